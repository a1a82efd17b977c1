"""Gives a packed model whose experts are on the disk host slots for some of its experts."""

import warnings
from collections.abc import Sequence

from tandem.checkpoint.config_values import experts_per_token, value_of
from tandem.checkpoint.mapped_files import places_of
from tandem.checkpoint.packed_files import expert_sums, experts_tensor, read_metadata
from tandem.core.errors import CapacityError, ConfigError, TandemWarning
from tandem.core.units import format_bytes
from tandem.devices import kind_of
from tandem.experts.cache.host_slots import ExpertPlace, HostSlots
from tandem.experts.cache.memory_watch import MemoryWatch
from tandem.experts.cache.sizing import DeviceMemory, budget_bytes, parse_gpu_memory
from tandem.experts.store.host_memory import available_bytes
from tandem.experts.store.packed_layer import PackedLayer
from tandem.foreign_types import PreTrainedModel
from tandem.hardware.page_cache import how_reads_go
from tandem.hf.config import OffloadConfig
from tandem.hf.kv_sizes import USUAL_CONTEXT, kv_sizes_of
from tandem.hf.runtime import require_runtime

# "auto" leaves this much of the free memory to other programs, prompts' activations, and keys and
# values. A cache that the system swaps out is worse than a small one. Larger keys and values get
# their memory beside half of this, up to a share that leaves room for experts.
_RESERVED_BYTES = 1 << 30
_RESERVED_SHARE = 0.06
_MOST_KV_SHARE = 0.5


def slots_over(model: PreTrainedModel, options: OffloadConfig, *, reserved_bytes: int = 0) -> bool:
    """Give a model's packed experts host slots, to run from the disk; False if that is impossible.

    `reserved_bytes` is the part of the free memory that other data will soon take. Host slots are
    impossible for a dense model, for a layer that is not packed or not in a mapped file, and with
    almost no memory. In these cases `TandemError` is raised if the options set a memory for
    experts. Raises `ConfigError` for an eviction that host slots do not support. `HostSlots.fill`
    reads experts into the slots.
    """
    runtime = require_runtime(model)
    layers = [layer for layer in runtime.store if isinstance(layer, PackedLayer)]
    places = _places(layers) if layers and len(layers) == len(runtime.store) else None
    if places is None:
        if options.expert_memory_bytes is None:
            return False
        if len(layers) < len(runtime.store):
            raise options.no_slots_for_plain()
        raise ConfigError(
            f"expert_memory is {options.expert_memory!r}, and this model's experts are in no file "
            "that is mapped; leave it out"
        )
    free = max(0, _free_bytes(options, runtime.store.num_bytes) - reserved_bytes)
    memory = options.expert_memory_bytes
    if memory is None:
        memory = room_for_experts(free, _kv_bytes(model, options))
    top_k = experts_per_token(model.config.get_text_config())
    options.require_slots_follow()
    try:
        slots = HostSlots(
            layers, places, memory, eviction=options.eviction, top_k=top_k,
            has_device=kind_of(options.device).machine != "",
        )  # fmt: skip
    except CapacityError:
        if options.expert_memory_bytes is not None:
            raise
        return False  # mapped files are slow, but take no memory of their own
    if _are_buffered_in_silence(places):
        slots.native.read_buffered()
    runtime.host_slots = slots
    MemoryWatch(slots, available_bytes, _reserved_bytes(free))
    where = places[0].file.parent
    if options.expert_memory_bytes is None:
        _warn(
            f"{where} has {format_bytes(runtime.store.num_bytes)} of experts and "
            f"{format_bytes(free)} of memory are free: {slots.share:.0%} of them stay in memory, "
            "the others are read from the disk when they are wanted"
        )
    if not slots.is_direct:
        _warn(
            f"the file system of {where} cannot bypass the page cache: experts that are read take "
            "twice their memory for a moment; put the model on a local disk"
        )
    return True


def fill_slots(model: PreTrainedModel) -> None:
    """Start reading experts into a model's slots, if it has any, while the disk is idle."""
    if (slots := require_runtime(model).host_slots) is not None:
        slots.fill()


def _free_bytes(options: OffloadConfig, experts_bytes: int) -> int:
    """Return the free host memory, minus the budget of an emulated device, which is in it."""
    free = available_bytes()
    if not kind_of(options.device).is_in_host_memory:
        return free
    budget = budget_bytes(parse_gpu_memory(options.gpu_memory), DeviceMemory(free, free))
    return free - min(experts_bytes, budget)


def room_for_experts(free_bytes: int, kv_bytes: int) -> int:
    """Return the bytes for slots, given that keys and values can grow to `kv_bytes`."""
    reserved, of_keys = _reserved_bytes(free_bytes), min(kv_bytes, int(_MOST_KV_SHARE * free_bytes))
    return max(0, free_bytes - max(reserved, reserved // 2 + of_keys))


def _reserved_bytes(free_bytes: int) -> int:
    return max(_RESERVED_BYTES, int(_RESERVED_SHARE * free_bytes))


def _kv_bytes(model: PreTrainedModel, options: OffloadConfig) -> int:
    """Return the most bytes of host memory that the sequences' keys and values can grow to."""
    if kind_of(options.device).holds_dense_parts:
        return 0
    config = model.config.get_text_config()
    longest = value_of(config, "max_position_embeddings") or USUAL_CONTEXT
    tokens = min(options.context or USUAL_CONTEXT, longest)
    return options.sequences * kv_sizes_of(config, model.dtype).bytes_of(tokens)


def _are_buffered_in_silence(places: Sequence[ExpertPlace]) -> bool:
    """Tell whether a file system of these files accepts unbuffered reads and buffers them anyway.

    Reads a piece of one file per file system, and checks whether the page cache holds the piece.
    """
    by_file_system = {place.file.stat().st_dev: place.file for place in places}
    return any(how_reads_go(file) == "silently buffered" for file in by_file_system.values())


def _places(layers: Sequence[PackedLayer]) -> list[ExpertPlace] | None:
    """Return where each layer's experts are in files; None if a layer is in no mapped file."""
    found = places_of([layer.buffers for layer in layers])
    if found is None:
        return None
    directory = found[0][0].parent
    metadata = read_metadata(directory)

    def sums_of(layer: PackedLayer) -> tuple[int, ...]:
        name, num_experts = experts_tensor(layer.arrivals.name), layer.arrivals.num_experts
        return expert_sums(directory, metadata, name, num_experts)

    return [
        ExpertPlace(file, first, layer.buffers.stride(0), sums_of(layer))
        for layer, (file, first) in zip(layers, found, strict=True)
    ]


def _warn(sentence: str) -> None:
    warnings.warn(sentence, TandemWarning, stacklevel=6)
