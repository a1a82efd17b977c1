"""The expert cache's memory: slots of equal size on a device, and the content of each slot.

Contents are numbered: every planned copy begins a new *generation* of its slot. A use belongs to
the generation that was planned when the use began, so it can read neither older nor newer bytes:

    plan_copy(g) -> begin_use(g) -> [bytes of g] -> land(g) -> images of the use -> end of the use
                 -> plan_copy(g + 1) may come at any time after begin_use(g), but
    the first byte of g + 1 comes after land(g) and after the end of every use of g (`can_write`).

A copy engine does the copies. All methods of this module may be called from any thread.
"""

import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from torch import Tensor

from tandem.kernels.formats.weight_format import aligned

# A large cache allocates several blocks, so that the device needs no contiguous range for all of
# it.
BLOCK_BYTES = 1 << 28
NOTHING = -1

Claim = tuple[int, int]  # (slot, generation)
FillSlots = Callable[[Sequence[Claim]], None]


class MemoryPool(Protocol):
    """The part of a device's interface that allocates memory for slots."""

    name: str

    def allocate(self, num_bytes: int) -> Tensor:
        """Return uint8 memory, aligned to 64 bytes; raises `OutOfDeviceMemoryError`."""

    def release(self, memory: Tensor) -> None:
        """Free memory."""
        return

    def synchronize(self) -> None:
        """Wait until all launched batches are done; raises their first error."""
        return

    def close(self) -> None:
        """End the device's threads."""


class SlotUse:
    """A batch's claim on the slots that it reads."""

    __slots__ = ("_fill", "_slots", "claims")

    def __init__(self, slots: "Slots", claims: list[Claim], fill: FillSlots | None) -> None:
        """Hold `claims`; `fill`, if given, gets them before each wait for the claimed contents."""
        self._slots = slots
        self._fill = fill
        self.claims = claims

    def images(self) -> list[Tensor]:
        """Wait until the claimed contents have landed; return the slots' memory."""
        if self._fill is not None:
            self._fill(self.claims)
        return self._slots.wait_landed(self.claims)

    def addresses(self) -> list[int]:
        """Wait until the claimed contents have landed; return the slots' addresses."""
        if self._fill is not None:
            self._fill(self.claims)
        return self._slots.wait_addresses(self.claims)

    def end(self) -> None:
        """Release the claims: this batch no longer reads the slots."""
        self._slots.end_use(self.claims)


class Slots:
    """`num_slots` slots of `slot_bytes` on a device, and the state of each slot's content."""

    def __init__(self, pool: MemoryPool, num_slots: int, slot_bytes: int) -> None:
        """Allocate the memory; if it raises `OutOfDeviceMemoryError`, no memory stays allocated."""
        self.slot_bytes = aligned(slot_bytes)
        self.num_slots = num_slots
        self.changed = threading.Condition()
        self._pool = pool
        self._blocks: list[Tensor] = []
        self._memory: list[Tensor] = []
        self._addresses: list[int] = []
        self._key = [NOTHING] * num_slots  # of the planned generation
        self._planned = [0] * num_slots
        self._landed = [0] * num_slots
        self._uses: dict[Claim, int] = {}
        self._error: BaseException | None = None
        try:
            self._allocate()
        except BaseException:
            self.release()
            raise

    def _allocate(self) -> None:
        per_block = max(1, BLOCK_BYTES // self.slot_bytes)
        while len(self._memory) < self.num_slots:
            count = min(per_block, self.num_slots - len(self._memory))
            block = self._pool.allocate(count * self.slot_bytes)
            self._blocks.append(block)
            self._memory += block.view(count, self.slot_bytes).unbind()
        self._addresses = [memory.data_ptr() for memory in self._memory]

    def release(self) -> None:
        """Free the memory; no slot may be used afterwards."""
        for block in self._blocks:
            self._pool.release(block)
        self._blocks, self._memory = [], []

    @property
    def num_bytes(self) -> int:
        """The bytes of device memory that all slots take."""
        return self.num_slots * self.slot_bytes

    def memory(self, slot: int) -> Tensor:
        """Return a slot's bytes, for a copy into it."""
        return self._memory[slot]

    def address(self, slot: int) -> int:
        """Return the address of a slot's bytes."""
        return self._addresses[slot]

    def key_in(self, slot: int) -> int:
        """Return the key of the expert that the slot holds or will hold; NOTHING if none."""
        return self._key[slot]

    def plan_copy(self, slot: int, key: int) -> int:
        """Begin the slot's next generation, for an expert; returns the generation's number."""
        with self.changed:
            self._key[slot] = key
            self._planned[slot] += 1
            return self._planned[slot]

    def begin_use(
        self, slots: Sequence[int], keys: Sequence[int], fill: FillSlots | None = None
    ) -> SlotUse:
        """Return a claim on `slots`, whose planned contents must be the experts `keys`.

        `fill` is passed to the returned `SlotUse`.
        """
        claims = []
        with self.changed:
            for slot, key in zip(slots, keys, strict=True):
                held = self._key[slot]
                assert held == key, f"slot {slot} is for expert {held}, not for {key}"
                claim = (slot, self._planned[slot])
                self._uses[claim] = self._uses.get(claim, 0) + 1
                claims.append(claim)
        return SlotUse(self, claims, fill)

    def end_use(self, claims: Sequence[Claim]) -> None:
        """Release claims, so that copies into their slots may begin."""
        with self.changed:
            for claim in claims:
                if self._uses.get(claim, 0) <= 1:
                    self._uses.pop(claim, None)
                else:
                    self._uses[claim] -= 1
            self.changed.notify_all()

    def can_write(self, slot: int, generation: int) -> bool:
        """Tell whether a generation may be written: its predecessor has landed and is unused."""
        before = generation - 1
        return self._landed[slot] == before and (slot, before) not in self._uses

    def land(self, contents: Iterable[tuple[int, int]]) -> None:
        """Record that all bytes of some generations, as (slot, generation), have arrived."""
        with self.changed:
            for slot, generation in contents:
                assert self._landed[slot] == generation - 1, f"slot {slot} skips a generation"
                self._landed[slot] = generation
            self.changed.notify_all()

    def adopt(self, slot: int, key: int) -> None:
        """Record that other code has filled a slot with an expert.

        No planned copy into the slot may be unfinished, and no batch may use the slot.
        """
        with self.changed:
            assert self._landed[slot] == self._planned[slot], f"slot {slot} is being written"
            self._key[slot] = key
            self._planned[slot] += 1
            self._landed[slot] = self._planned[slot]

    def void(self, slot: int, generation: int) -> None:
        """Cancel a planned generation that no batch uses; the slot then holds nothing."""
        with self.changed:
            assert (slot, generation) not in self._uses, f"slot {slot} is used"
            if self._planned[slot] == generation:
                self._key[slot] = NOTHING
            self._landed[slot] = generation
            self.changed.notify_all()

    def wait_landed(self, claims: Sequence[Claim]) -> list[Tensor]:
        """Wait until claimed generations have landed; returns their slots' memory."""
        self._wait(claims)
        return [self._memory[slot] for slot, _ in claims]

    def wait_addresses(self, claims: Sequence[Claim]) -> list[int]:
        """Wait until claimed generations have landed; returns their slots' addresses."""
        self._wait(claims)
        return [self._addresses[slot] for slot, _ in claims]

    def _wait(self, claims: Sequence[Claim]) -> None:
        landed = self._landed
        for slot, generation in claims:
            if landed[slot] != generation:
                break
        else:
            return
        with self.changed:
            self.changed.wait_for(lambda: self._error or all(landed[s] == g for s, g in claims))
            if self._error is not None:
                raise self._error

    def forget_uses(self) -> None:
        """Drop all claims, also those of batches that were never launched.

        No launched batch may still be running.
        """
        with self.changed:
            self._uses.clear()
            self.changed.notify_all()

    def fail(self, error: BaseException) -> None:
        """Make waits for missing contents raise `error`, because no more contents will arrive."""
        with self.changed:
            self._error = error
            self.changed.notify_all()
