"""Host slots for a model whose experts are on the disk.

Each layer keeps the same share of its experts in memory; its other experts are read when they are
needed (`csrc/disk`). The packed files stay mapped too, for rare reads of single experts.
"""

from collections.abc import Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from tandem.core.errors import CapacityError, ModelError
from tandem.core.units import format_bytes
from tandem.experts.cache.policy_tables import host_slot_tables
from tandem.experts.store.layer_slots import LayerSlots
from tandem.experts.store.packed_layer import PackedLayer
from tandem.experts.store.pinning import Pin, pin_slots
from tandem.kernels import _native
from tandem.kernels.dense import DenseWeight
from tandem.kernels.memory import allocate_buffers
from tandem.policy.plan import Geometry

# Reads at once, and bytes of each: a disk of 2 GB/s needs 4 MB under way to reach its rate.
READERS = 8
_PIECE_BYTES = 1280 << 10
# Slots for experts of any layer that only pass through: those not admitted, and those of a prompt's
# next layer.
_TRANSIT_SLOTS = 32
# Slots for held experts: those on their way to a device, or the one that torch code computes.
_HELD_FOR_DEVICE, _HELD_FOR_CPU = 4, 1
# A request fails after this time without a byte, long enough for a disk to spin up.
_PATIENCE_SECONDS = 60.0
_HUGE_PAGE_BYTES = 2 << 20


@dataclass(frozen=True, slots=True)
class ExpertPlace:
    """Where a layer's experts are in a file: expert e at byte `first` + e * `stride`."""

    file: Path
    first: int
    stride: int
    sums: tuple[int, ...] = ()
    """CRC-32C of each expert's `stride` bytes; empty if the file has no checksums."""


class AheadRouter(NamedTuple):
    """A layer's router, to be run ahead: the largest values of scoring(weight @ state) + bias."""

    weight: DenseWeight
    bias: list[float]
    """By expert; empty if the router has none."""
    scoring: int
    """The kernels' number of the scoring function (`look_ahead_routers.SCORINGS`)."""


@dataclass(frozen=True, slots=True)
class SlotStatistics:
    """Counters of a model's host slots since the model was loaded."""

    hits: int = 0
    misses: int = 0
    device_hits: int = 0
    """Experts that were in memory when a device needed them, not counted in `hits`."""
    device_misses: int = 0
    """Experts that were read from the disk for a device, not counted in `misses`."""
    likely_reads: int = 0
    """Experts that were read because the next layer's router, run ahead, chose them."""
    likely_used: int = 0
    """Those of `likely_reads` that the layer then used."""
    read_bytes: int = 0
    waited_seconds: float = 0.0

    def since(self, before: "SlotStatistics") -> "SlotStatistics":
        """Return by how much each counter has grown since `before`, an earlier state."""
        pairs = zip(astuple(self), astuple(before), strict=True)
        return SlotStatistics(*(now - then for now, then in pairs))

    @property
    def hit_rate(self) -> float:
        """The share of hits among `hits` and `misses`; experts read for a device do not count."""
        return self.hits / max(1, self.hits + self.misses)


class HostSlots:
    """The host slots of all layers of a model that runs from the disk."""

    def __init__(
        self,
        layers: Sequence[PackedLayer],
        places: Sequence[ExpertPlace],
        memory_bytes: int,
        *,
        eviction: str,
        top_k: int,
        has_device: bool,
    ) -> None:
        """Allocate slots in at most `memory_bytes`, and set `layer.slots` of each layer.

        Layer i's experts are at `places[i]`. `eviction` must be one of `IN_HOST_SLOTS`. Raises
        `CapacityError` if `memory_bytes` is too little, `ModelError` if a file cannot be used.
        """
        sizes = [
            _native.slot_bytes(place.first, place.stride, layer.layout.num_bytes, bool(place.sums))
            for layer, place in zip(layers, places, strict=True)
        ]
        counts = [layer.arrivals.num_experts for layer in layers]
        self.share = share_of(memory_bytes, sizes, counts, has_device=has_device)
        """The share of each layer's experts that memory holds."""
        self.num_slots = [int(count * self.share) for count in counts]
        self.slot_bytes = max(sizes)
        self.files = sorted({place.file for place in places})
        self.has_sums = all(place.sums for place in places)
        """Whether all files have checksums, so that damaged bytes are detected."""
        shared = num_transit(counts, has_device=has_device)
        self._transit = page_aligned(shared, max(sizes))
        self.transit_bytes = self._transit.nbytes
        self._memory = list(map(page_aligned, self.num_slots, sizes))
        self.memory = *self._memory, self._transit
        """The memory of each layer's slots, then of the transit slots."""
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
                entries, self._transit, _num_held(has_device), READERS, _PIECE_BYTES,
                _PATIENCE_SECONDS,
            )  # fmt: skip
        except RuntimeError as error:
            raise ModelError(str(error)) from None
        self._routers: Sequence[AheadRouter | None] | None = None
        for number, layer in enumerate(layers):
            layer.slots = LayerSlots(self.native, number, layer.layout.num_bytes)

    @property
    def is_direct(self) -> bool:
        """Whether reads bypass the system's page cache."""
        return self.native.is_direct()

    def fill(self) -> None:
        """Start reading experts into free slots whenever the disk is idle."""
        self.native.fill()

    def run_ahead(self, routers: Sequence[AheadRouter | None], hidden_size: int) -> None:
        """Run these routers ahead in decode steps from now on, one for each layer; None: not.

        Their inputs have `hidden_size` values. No routers: steps do not look ahead.
        """
        self._routers = routers  # the native object refers to their weights
        given = [(x.weight.native, x.bias, x.scoring) if x else (None, (), 0) for x in routers]
        if given:
            self.native.run_ahead(_native.LookAhead(given, hidden_size))

    @property
    def looks_ahead(self) -> bool:
        """Whether `run_ahead` has been called."""
        return self._routers is not None

    def pin(self, pin: Pin) -> None:
        """Pin the slots' memory as far as possible.

        If any memory was pinned, the slots no longer give memory back under pressure: the device
        reads these pages by address, so they must stay in place.
        """
        if pin_slots([self._transit, *self._memory], pin).num_bytes > 0:
            self.native.pin()

    def statistics(self) -> SlotStatistics:
        """Return the counters since the model was loaded."""
        counts = self.native.counts()
        return SlotStatistics(
            counts.hits, counts.misses, counts.device_hits, counts.device_misses,
            counts.likely, counts.likely_used, counts.read_bytes, counts.waited_seconds,
        )  # fmt: skip


def num_transit(counts: Sequence[int], *, has_device: bool) -> int:
    """Return the number of transit slots, and slots for held experts, that all layers share.

    `counts` are the layers' numbers of experts. With a device, it takes copies of experts.
    """
    return min(_TRANSIT_SLOTS, *counts) + _num_held(has_device)


def _num_held(has_device: bool) -> int:
    return _HELD_FOR_DEVICE if has_device else _HELD_FOR_CPU


def share_of(
    memory_bytes: int, sizes: Sequence[int], counts: Sequence[int], *, has_device: bool
) -> float:
    """Return the share of all experts that fits in memory beside the slots that layers share.

    `sizes` and `counts` are each layer's slot size in bytes and number of experts. Raises
    `CapacityError` if the shared slots (`num_transit`) alone do not fit.
    """
    shared = num_transit(counts, has_device=has_device) * max(sizes)
    room = memory_bytes - shared
    if room < 0:
        raise CapacityError(
            f"experts on the disk have {format_bytes(memory_bytes)} of memory and need at least "
            f"{format_bytes(shared)}; free memory, or give more as expert_memory"
        )
    return min(1.0, room / sum(size * count for size, count in zip(sizes, counts, strict=True)))


def _tables(
    eviction: str, counts: Sequence[int], num_slots: Sequence[int], top_k: int
) -> Sequence[_native.NextUseTable | None]:
    """Return a `next-use` table for each layer; for the eviction "lru", None for each layer."""
    if eviction == "lru":
        return [None] * len(counts)
    return host_slot_tables(Geometry(len(counts), max(counts), top_k), max(num_slots))


def page_aligned(num_slots: int, slot_bytes: int) -> Tensor:
    """Return memory (num_slots, slot_bytes) uint8 that begins at a huge page.

    Disk reads into small pages are split page by page, and take twice as long.
    """
    memory = allocate_buffers(1, num_slots * slot_bytes + _HUGE_PAGE_BYTES)[0]
    first = -memory.data_ptr() % _HUGE_PAGE_BYTES
    size = num_slots * slot_bytes
    with torch.inference_mode(False):
        return memory[first : first + size].view(num_slots, slot_bytes)
