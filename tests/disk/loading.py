"""Loads models, or puts stores, on the disk with host slots for a part of the experts."""

from array import array
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import tandem
from tandem.experts.cache.host_slots import ExpertPlace, HostSlots, num_transit
from tandem.experts.store.host_store import HostStore
from tandem.experts.store.packed_layer import PackedLayer
from tandem.kernels import _native
from tandem.kernels.formats.weight_format import FILE_ALIGNMENT_BYTES, aligned
from tests.architecture_sizes import VOCABULARY
from tests.hf.tiny import save_tiny_checkpoint
from tests.inside import runtime_in

EXPERTS, TOP_K, LAYERS = 16, 4, 3  # of the fixture `packed`


def packed_model(folder: Path, name: str = "qwen3_moe", **values: Any) -> Path:
    """Write a tiny model and its packed form; return the packed form's path."""
    plain = save_tiny_checkpoint(folder / "plain", name, **values)
    return tandem.save(tandem.load(plain, expert_dtype="int8"), folder / "packed")


def ids(count: int, seed: int = 3) -> Tensor:
    random = torch.Generator().manual_seed(seed)
    return torch.randint(4, VOCABULARY, (1, count), generator=random)


def slots_of(model: Any) -> HostSlots:
    slots = runtime_in(model).host_slots
    assert isinstance(slots, HostSlots)
    return slots


def memory_for(packed: Path, share: float, *, has_device: bool = False) -> str:
    """Return the `expert_memory` that holds a share of a model's experts."""
    least = slots_of(tandem.load(packed, expert_memory="1GB"))
    on_cpu, shared = (num_transit([1 << 30], has_device=device) for device in (False, has_device))
    transit_bytes = least.transit_bytes + (shared - on_cpu) * least.slot_bytes
    return str(transit_bytes + int(share * least.resident_bytes) + 1)


def with_share(packed: Path, share: float, **options: Any) -> Any:
    """Load the model with host slots for a share of its experts."""
    memory = memory_for(packed, share, has_device="device" in options)
    return tandem.load(packed, expert_memory=memory, **options)


def put_on_disk(
    store: HostStore, file: Path, share: float, *, eviction: str = "next-use", top_k: int = 3
) -> HostSlots:
    """Write a store's experts to a file and read them into host slots for a share of them.

    A device may hold some. The store's tensors stay, as expected values.
    """
    layers, places = [layer for layer in store if isinstance(layer, PackedLayer)], []
    with file.open("wb") as out:
        for layer in layers:
            first, stride = out.tell(), aligned(layer.layout.num_bytes, FILE_ALIGNMENT_BYTES)
            experts = [bytes(expert.numpy()).ljust(stride, b"\0") for expert in layer.buffers]
            out.write(b"".join(experts))
            sums = [_native.crc32c(array("B", expert), 0) for expert in experts]
            places.append(ExpertPlace(file, first, stride, tuple(sums)))
    make = partial(HostSlots, layers, places, eviction=eviction, top_k=top_k, has_device=True)
    least = make(1 << 30)
    size = least.transit_bytes + int(share * least.resident_bytes) + 1
    return make(size)
