"""Gives a packed model whose experts lie on the disk slots in memory for a part of them."""

import warnings

from tandem.checkpoint.packed import packed_name
from tandem.core.errors import TandemWarning
from tandem.core.units import format_bytes
from tandem.experts.cache.host_slots import ExpertPlace, HostSlots
from tandem.experts.store.host_memory import available_bytes
from tandem.experts.store.packed_layer import STORED_NAME, PackedLayer
from tandem.foreign_types import PreTrainedModel
from tandem.hf.checkpoint import Checkpoint
from tandem.hf.config import OffloadConfig
from tandem.hf.runtime import require_runtime

# Of the free memory, "auto" leaves so much to keys and values, to prompts' activations and to other
# programs; a cache that the system pushes out is worse than a small one.
_RESERVED_BYTES = 1 << 30
_RESERVED_SHARE = 0.06
_USUAL_TOP_K = 8


def slots_over(checkpoint: Checkpoint, model: PreTrainedModel, options: OffloadConfig) -> bool:
    """Let a model's packed experts come from the disk into slots in memory; tells whether it could.

    Some layers may be plain: those stay mapped files. Raises `CapacityError` for too little memory.
    """
    runtime = require_runtime(model)
    layers = [layer for layer in runtime.store if isinstance(layer, PackedLayer)]
    if len(layers) < len(runtime.store):
        return False
    free, memory = available_bytes(), options.expert_memory_bytes
    if memory is None:
        memory = max(0, free - max(_RESERVED_BYTES, int(_RESERVED_SHARE * free)))
    top_k = getattr(model.config.get_text_config(), "num_experts_per_tok", None) or _USUAL_TOP_K
    slots = HostSlots(
        layers, [_place(checkpoint, layer) for layer in layers], memory,
        eviction=options.eviction, top_k=top_k,
    )  # fmt: skip
    runtime.host_slots = slots
    if options.expert_memory_bytes is None:
        warnings.warn(
            f"{checkpoint.directory} has {format_bytes(runtime.store.num_bytes)} of experts and "
            f"{format_bytes(free)} of memory are free: {slots.share:.0%} of them stay in memory, "
            "the others are read from the disk when they are wanted",
            TandemWarning,
            stacklevel=5,
        )
    if not slots.is_direct:
        warnings.warn(
            f"the file system of {checkpoint.directory} takes no unbuffered reads: experts from "
            "it take twice the memory for a moment; put the model on a local disk",
            TandemWarning,
            stacklevel=5,
        )
    return True


def _place(checkpoint: Checkpoint, layer: PackedLayer) -> ExpertPlace:
    entry = checkpoint.files.entries[f"{layer.arrivals.name}.{packed_name(STORED_NAME)}"]
    return ExpertPlace(entry.file, entry.first, entry.num_bytes // entry.shape[0])
