"""Copies experts from the host store into slots. This order of events keeps contents correct:

    submit(copy)            the slot's next generation begins: from now on no batch can claim the
                            old content, and every claim made before is known
      -> end of all claims on the old content
      -> first byte .. last byte
      -> the generation lands: batches that claimed it run
      -> `arrivals` reports the copy, and only then may the planner reuse the slot

Only the executor's thread may call `submit`, `use` and `arrivals`. There are two engines.
`VirtualCopyEngine` moves bytes by a virtual clock, at the last permitted moment. So a batch that
wrongly does not wait computes with the wrong expert, and tests notice it. `devices.cuda.copies` has
the GPU's engine.
"""

from collections.abc import Iterable, Sequence
from typing import Protocol

from torch import Tensor

from tandem.experts.cache.clock import Clock
from tandem.experts.cache.slots import Claim, Slots, SlotUse
from tandem.experts.store.host_store import HostStore
from tandem.policy.plan import Copy, Geometry


class CopyEngine(Protocol):
    """Copies experts from the host store to one device's slots."""

    slots: Slots

    def submit(self, copies: Sequence[Copy], *, is_needed: bool) -> None:
        """Queue copies; copies that a layer waits for (`is_needed`) precede queued prefetches."""

    def flush(self) -> None:
        """Start submitted prefetches if the link has room; call this after the last `submit`."""
        return

    def use(self, slots: Sequence[int], keys: Sequence[int]) -> SlotUse:
        """Return a batch's claim on `slots`, whose planned contents must be the experts `keys`."""

    def arrivals(self) -> Iterable[tuple[int, int, float]]:
        """Return (layer, expert, end time in seconds) of copies that ended since the last call.

        The earliest end comes first.
        """

    def cancel(self, layer: int, experts: Sequence[int]) -> list[int]:
        """Cancel the copies of these experts that have not begun; return the cancelled experts."""

    def drain(self) -> None:
        """Wait until every copy has ended or failed."""

    def close(self) -> None:
        """End the engine's threads."""
        return


class VirtualCopyEngine(CopyEngine):
    """Copies with durations from a virtual clock; the bytes move when something waits for them."""

    def __init__(self, store: HostStore, slots: Slots, geometry: Geometry, clock: Clock) -> None:
        """Prepare copies from `store` to `slots`; `clock` says when each copy ends."""
        self.slots = slots
        self._store = store
        self._geometry = geometry
        self._clock = clock
        self._pending: dict[Claim, tuple[int, int]] = {}  # claim -> (layer, expert)
        self._claim_of: dict[tuple[int, int], Claim] = {}

    def submit(self, copies: Sequence[Copy], *, is_needed: bool) -> None:
        """Record copies; their bytes move when a batch waits for them, or when they arrive."""
        for copy in copies:
            self._note(copy)

    def _note(self, copy: Copy) -> None:
        generation = self.slots.plan_copy(copy.slot, self._geometry.key(copy.layer, copy.expert))
        older = copy.slot, generation - 1
        # No batch has waited for the old copy, and its slot is planned again.
        if older in self._pending:
            self._write(older)
        claim = copy.slot, generation
        self._pending[claim] = copy.layer, copy.expert
        self._claim_of[copy.layer, copy.expert] = claim

    def use(self, slots: Sequence[int], keys: Sequence[int]) -> SlotUse:
        """Return a claim on `slots`; bytes of pending copies into them move when they are read."""
        return self.slots.begin_use(slots, keys, self._fill if self._pending else None)

    def arrivals(self) -> Iterable[tuple[int, int, float]]:
        """Yield the copies that the clock reports as ended, each after its bytes have moved."""
        for arrival in self._clock.arrivals():
            claim = self._claim_of.pop(arrival[:2], None)
            if claim in self._pending:
                assert claim is not None
                self._write(claim)
            yield arrival

    def cancel(self, layer: int, experts: Sequence[int]) -> list[int]:
        """Cancel nothing: the virtual link, like the simulator's, performs all planned copies."""
        return []

    def drain(self) -> None:
        """Move the bytes of all pending copies now."""
        self._fill(list(self._pending))

    def _fill(self, claims: Sequence[Claim]) -> None:
        for claim in claims:
            if claim in self._pending:
                self._write(claim)

    def _write(self, claim: Claim) -> None:
        slot, generation = claim
        assert self.slots.can_write(slot, generation), f"slot {slot} is in use"
        layer, expert = self._pending.pop(claim)
        copy_image(self._store, layer, expert, self.slots.memory(slot))
        self.slots.land([(slot, generation)])


def copy_image(store: HostStore, layer: int, expert: int, memory: Tensor) -> None:
    """Copy an expert's bytes from the host store to a slot's `memory`.

    A copy to a GPU is queued on the current stream; this call does not wait for it.
    """
    with store[layer].hold(expert) as extents:
        for offset, data in extents:
            memory[offset : offset + len(data)].copy_(data, non_blocking=True)
