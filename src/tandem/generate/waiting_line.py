"""Requests that wait for a sequence slot, ordered by priority number, then by arrival.

Entries of dropped requests stay in the heap until they reach its top or make up about half of it.
So adding a request takes no pass over the queue, and dropping thousands at once takes only a few.
"""

import heapq
import itertools
from collections.abc import Iterable
from typing import Generic, TypeVar

_FEW = 64

T = TypeVar("T")


class WaitingLine(Generic[T]):
    """A priority queue of waiting requests, each identified by its number."""

    def __init__(self) -> None:
        """Start with an empty queue."""
        self._heap: list[tuple[int, int, int]] = []  # priority, arrival, number
        self._waiting: dict[int, tuple[int, T]] = {}  # arrival, request
        self._arrivals = itertools.count()

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, number: int, priority: int, request: T) -> None:
        """Add a request to the queue."""
        arrival = next(self._arrivals)
        heapq.heappush(self._heap, (priority, arrival, number))
        self._waiting[number] = arrival, request

    def pop(self) -> T:
        """Remove and return the next request; raises `IndexError` if there is none."""
        while True:
            entry = heapq.heappop(self._heap)
            if self._is_waiting(entry):
                return self._waiting.pop(entry[2])[1]

    def drop(self, numbers: Iterable[int]) -> int:
        """Remove the requests with these numbers; return how many of them were in the queue."""
        num_dropped = sum(self._waiting.pop(number, None) is not None for number in numbers)
        if len(self._heap) > 2 * len(self._waiting) + _FEW:
            self._heap = [*filter(self._is_waiting, self._heap)]
            heapq.heapify(self._heap)
        return num_dropped

    def _is_waiting(self, entry: tuple[int, int, int]) -> bool:
        _, arrival, number = entry
        return number in self._waiting and self._waiting[number][0] == arrival
