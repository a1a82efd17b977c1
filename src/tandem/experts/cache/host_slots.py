"""Slots in host memory of a model whose experts lie on the disk, and how much of it there is.

Each layer keeps the same share of its experts in memory; the others are read when they are wanted
(`csrc/disk`). The packed files stay mapped as well, for what reads an expert once in a while.
"""

from collections.abc import Sequence
from dataclasses import astuple, dataclass
from pathlib import Path

import torch
from torch import Tensor

from tandem.core.errors import CapacityError, ModelError
from tandem.core.units import format_bytes
from tandem.experts.cache.policy_tables import host_slot_tables
from tandem.experts.store.layer_slots import LayerSlots
from tandem.experts.store.packed_layer import PackedLayer
from tandem.experts.store.pinning import Pin, pin_slots
from tandem.kernels import _native
from tandem.kernels.memory import allocate_buffers
from tandem.policy.plan import Geometry

# So many reads are under way at once, in such pieces: a disk of 2 GB/s gives its rate from 4 MB on.
_READERS = 8
_PIECE_BYTES = 1280 << 10
# Experts of any layer that pass through: what is not admitted, and a prompt's next layer.
_TRANSIT_SLOTS = 32
_HELD_SLOTS = 4  # experts on their way to a device that memory does not keep
# Without a byte for so long a request fails; the disk may wake up from its sleep.
_PATIENCE_SECONDS = 60.0
_HUGE_PAGE_BYTES = 2 << 20


@dataclass(frozen=True, slots=True)
class ExpertPlace:
    """Where a layer's experts lie in a file: expert e at byte `first` + e * `stride`."""

    file: Path
    first: int
    stride: int
    sums: tuple[int, ...] = ()
    """CRC-32C of `stride` bytes from each expert on; empty where the file has none."""


@dataclass(frozen=True, slots=True)
class SlotStatistics:
    """What the slots of a model have done so far."""

    hits: int = 0
    misses: int = 0
    device_hits: int = 0
    """Experts that a device took from memory, beside those that layers used here."""
    device_misses: int = 0
    """Experts that were read from the disk for a device."""
    read_bytes: int = 0
    waited_seconds: float = 0.0

    def since(self, before: "SlotStatistics") -> "SlotStatistics":
        """Return what has come on top."""
        pairs = zip(astuple(self), astuple(before), strict=True)
        return SlotStatistics(*(now - then for now, then in pairs))

    @property
    def hit_rate(self) -> float:
        """Share of the experts that were used here which were in memory."""
        return self.hits / max(1, self.hits + self.misses)


class HostSlots:
    """Slots in memory for the experts of some layers that lie on the disk."""

    def __init__(
        self,
        layers: Sequence[PackedLayer],
        places: Sequence[ExpertPlace],
        memory_bytes: int,
        *,
        eviction: str,
        top_k: int,
    ) -> None:
        """Take at most `memory_bytes`; raises `CapacityError` if that is too little.

        `eviction` is one of `IN_HOST_SLOTS`.
        """
        sizes = [
            _native.slot_bytes(place.first, place.stride, layer.layout.num_bytes, bool(place.sums))
            for layer, place in zip(layers, places, strict=True)
        ]
        counts = [layer.arrivals.num_experts for layer in layers]
        self.share = share_of(memory_bytes, sizes, counts)
        """Of each layer's experts that memory holds."""
        self.num_slots = [int(count * self.share) for count in counts]
        self.slot_bytes = max(sizes)
        self.has_sums = all(place.sums for place in places)
        """Whether damaged bytes are found."""
        self._transit = page_aligned(num_transit(counts), max(sizes))
        self.transit_bytes = self._transit.nbytes
        self._memory = list(map(page_aligned, self.num_slots, sizes))
        self.memory = *self._memory, self._transit
        """Of the slots, by layer, and of those that all layers share."""
        self.num_bytes = sum(memory.nbytes for memory in self.memory)
        self.resident_bytes = self.num_bytes - self.transit_bytes
        self._tables = _tables(eviction, counts, self.num_slots, top_k)
        entries = [
            _native.SlotLayer(
                str(place.file), place.first, place.stride, layer.layout.num_bytes, place.sums,
                layer.arrivals.num_experts, memory, table,
            )
            for layer, place, memory, table in zip(
                layers, places, self._memory, self._tables, strict=True
            )
        ]  # fmt: skip
        try:
            self.native = _native.HostSlots(
                entries, self._transit, _HELD_SLOTS, _READERS, _PIECE_BYTES, _PATIENCE_SECONDS
            )
        except RuntimeError as error:
            raise ModelError(str(error)) from None
        for number, layer in enumerate(layers):
            layer.slots = LayerSlots(self.native, number, layer.layout.num_bytes)

    @property
    def is_direct(self) -> bool:
        """Whether reads pass by the system's page cache."""
        return self.native.is_direct()

    def fill(self) -> None:
        """Begin to read experts into free slots while nothing else is asked of the disk."""
        self.native.fill()

    def pin(self, pin: Pin) -> None:
        """Pin the slots' memory as far as that goes; it is not given back while they live.

        Pages that a device reads by their addresses must not be replaced by others.
        """
        if pin_slots([self._transit, *self._memory], pin).num_bytes > 0:
            self.native.pin()

    def statistics(self) -> SlotStatistics:
        """Return what has been read and found since the load."""
        counts = self.native.counts()
        return SlotStatistics(
            counts.hits, counts.misses, counts.device_hits, counts.device_misses,
            counts.read_bytes, counts.waited_seconds,
        )  # fmt: skip


def num_transit(counts: Sequence[int]) -> int:
    """Return how many slots layers of so many experts share."""
    return min(_TRANSIT_SLOTS, *counts) + _HELD_SLOTS


def share_of(memory_bytes: int, sizes: Sequence[int], counts: Sequence[int]) -> float:
    """Return the share of all experts that memory holds beside the slots that layers share.

    `sizes` and `counts` are of the layers' slots and experts. Raises `CapacityError` if not even
    the shared ones fit.
    """
    shared = num_transit(counts) * max(sizes)
    room = memory_bytes - shared
    if room < 0:
        raise CapacityError(
            f"{format_bytes(memory_bytes)} of memory are there for experts on the disk, and "
            f"{format_bytes(shared)} are the least; free memory, or give more as expert_memory"
        )
    return min(1.0, room / sum(size * count for size, count in zip(sizes, counts, strict=True)))


def _tables(
    eviction: str, counts: Sequence[int], num_slots: Sequence[int], top_k: int
) -> Sequence[_native.NextUseTable | None]:
    """Return what the eviction learns in, by layer; None: the least recently used leaves."""
    if eviction == "lru":
        return [None] * len(counts)
    return host_slot_tables(Geometry(len(counts), max(counts), top_k), max(num_slots))


def page_aligned(num_slots: int, slot_bytes: int) -> Tensor:
    """Return memory (num_slots, slot_bytes) uint8 that begins at a huge page.

    A disk writes into small pages one by one: that takes twice as long.
    """
    memory = allocate_buffers(1, num_slots * slot_bytes + _HUGE_PAGE_BYTES)[0]
    first = -memory.data_ptr() % _HUGE_PAGE_BYTES
    size = num_slots * slot_bytes
    with torch.inference_mode(False):
        return memory[first : first + size].view(num_slots, slot_bytes)
