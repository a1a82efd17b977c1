"""Requests that wait for a sequence slot: those of lower priority numbers first, then by arrival.

A heap whose dropped entries stay until they reach its top or are half of it, so that neither a
request that comes nor thousands that leave at once take time for each one that waits.
"""

import heapq
from collections.abc import Iterable

_FEW = 64


class WaitingLine:
    """Numbers of requests in their order; numbers grow with arrival."""

    def __init__(self) -> None:
        """Begin with nobody waiting."""
        self._heap: list[tuple[int, int]] = []  # priority, number
        self._numbers: set[int] = set()

    def __len__(self) -> int:
        return len(self._numbers)

    def add(self, number: int, priority: int) -> None:
        """Let a request wait."""
        heapq.heappush(self._heap, (priority, number))
        self._numbers.add(number)

    def pop(self) -> int:
        """Return whose turn it is, which waits no longer; `IndexError` if none waits."""
        while True:
            _, number = heapq.heappop(self._heap)
            if number in self._numbers:
                self._numbers.remove(number)
                return number

    def drop(self, numbers: Iterable[int]) -> None:
        """Take requests out of the line, as far as they are in it."""
        self._numbers.difference_update(numbers)
        if len(self._heap) > 2 * len(self._numbers) + _FEW:
            self._heap = [entry for entry in self._heap if entry[1] in self._numbers]
            heapq.heapify(self._heap)
