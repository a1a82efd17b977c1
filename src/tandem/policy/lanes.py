"""SIMD within one Python integer (SWAR): adding two rows of 128 numbers costs one addition.

A row holds one 32-bit SIMD lane per expert, a fraction of 1 scaled by `ONE`. This makes tables of
all pairs of experts affordable between two layers of a decode step (0.1 microseconds a row).
A lane must never go below 0 or over 32 bits, or it would borrow from its neighbour: a caller that
subtracts must add an offset first.
"""

import sys
from collections.abc import Iterable

assert sys.byteorder == "little", "lanes are read in place"

LANE_BITS = 32
ONE = 65536


class Lanes:
    """Arithmetic on rows of `num_experts` lanes; a row itself is a plain integer."""

    def __init__(self, num_experts: int) -> None:
        """Prepare the masks for `num_experts` lanes."""
        self.num_experts = num_experts
        self.num_bytes = LANE_BITS // 8 * num_experts
        self.unit = [1 << (LANE_BITS * expert) for expert in range(num_experts)]
        self.ones = sum(self.unit)
        self._keep = [self.ones * ((1 << (LANE_BITS - shift)) - 1) for shift in range(17)]

    def used(self, experts: Iterable[int]) -> int:
        """Return the row with 1, not `ONE`, in the lanes of these experts and 0 elsewhere."""
        unit, row = self.unit, 0
        for expert in experts:
            row |= unit[expert]
        return row

    def filled(self, share: float) -> int:
        """Return the row that holds `share` in every lane."""
        return self.ones * int(ONE * share)

    def shifted(self, row: int, shift: int) -> int:
        """Return the row with every lane divided by 2**shift, rounded down."""
        return (row >> shift) & self._keep[shift]

    def moved(self, average: int, used: int, shift: int) -> int:
        """Return the row of moving averages after one more step, whose weight is 1 / 2**shift.

        `average` is the row before the step. `used` holds each expert's count in the step as a
        plain integer, not scaled by `ONE`; 0 if the expert is not used.
        """
        return average + (used << (16 - shift)) - ((average >> shift) & self._keep[shift])

    def read(self, row: int) -> memoryview:
        """Return the row's lanes as a sequence of integers, indexed by expert."""
        return memoryview(row.to_bytes(self.num_bytes, "little")).cast("I")
