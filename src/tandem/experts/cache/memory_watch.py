"""Shrinks host slots while the system is short of memory, and grows them again afterwards.

A cache that the system swaps out is worse than a small one: reading a slot back costs a page fault
for each 4 KB.
"""

import threading
import weakref
from collections.abc import Callable

from tandem.experts.cache.host_slots import HostSlots

# Shares of the memory that should stay free. Below the first, slots are given back; above the
# second, slots are added.
_SHORT, _PLENTY = 0.5, 1.5
# Share of its slots that a layer keeps at least.
_LEAST_SHARE = 0.05


class MemoryWatch:
    """Checks the free memory in a thread and resizes host slots, as long as the slots exist."""

    def __init__(
        self,
        slots: HostSlots,
        free_bytes: Callable[[], int],
        reserved_bytes: int,
        *,
        seconds: float = 1.0,
    ) -> None:
        """Start the thread: check every `seconds`, and keep about `reserved_bytes` free."""
        self._slots, self._free_bytes = weakref.ref(slots), free_bytes
        self._reserved, self._seconds = reserved_bytes, seconds
        self._share = 1.0
        self._has_ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="tandem-memory", daemon=True)
        weakref.finalize(slots, self._has_ended.set)
        self._thread.start()

    def _run(self) -> None:
        while not self._has_ended.wait(self._seconds):
            slots = self._slots()
            if slots is None:
                return
            self.look(slots)
            del slots

    def look(self, slots: HostSlots) -> float:
        """Check once, and shrink or grow the slots if necessary; return the share in use."""
        free = self._free_bytes()
        if not _SHORT * self._reserved <= free <= _PLENTY * self._reserved:
            change = (free - self._reserved) / max(1, slots.resident_bytes)
            self._share = min(1.0, max(_LEAST_SHARE, self._share + change))
            slots.native.use_share(self._share)
        return self._share
