"""Online linear regression for all experts of a layer at once: predictions are sums of active rows.

A row holds one number per expert: what one input (an expert in use, or a token) adds to each
expert's prediction. The rows of this step's inputs are active. Once the true load or score is
known, a part of the error is added to each active row (the delta rule). A row's numbers are SIMD
lanes (see `lanes`), which must not go below 0, so an offset is added to each. The offsets allow
values from -16 to 16 and errors from -256 to 256.
"""

from collections.abc import Sequence
from functools import lru_cache

from tandem.policy.lanes import ONE, Lanes

ROW_OFFSET = 1 << 20  # offset in every lane of a row
SUM_OFFSET = 1 << 23  # offset in every lane that `read` returns
ERROR_OFFSET = 1 << 24


class Regression:
    """The arithmetic of the regression; callers own the tables of rows."""

    def __init__(self, lanes: Lanes) -> None:
        """Store `lanes`; all rows must have its number of experts."""
        self._lanes = lanes
        # Number of rows -> bias that turns their sum into values.
        self._sum_bias: dict[int, int] = {}
        # (number of rows, shift) -> biases.
        self._error_bias: dict[tuple[int, int], tuple[int, int]] = {}

    def row(self, value: float) -> int:
        """Return a row that adds `value` to the prediction of every expert."""
        return self._lanes.ones * (ROW_OFFSET + round(ONE * value))

    def shifted_sum(self, total: int, num_rows: int, shift: int) -> int:
        """Return 2**shift times the sum of `num_rows` rows, each lane plus SUM_OFFSET << shift.

        `total` is the rows' plain sum, with their offsets.
        """
        bias = self._sum_bias.get(num_rows)
        if bias is None:
            bias = self._lanes.ones * (SUM_OFFSET - num_rows * ROW_OFFSET)
            self._sum_bias[num_rows] = bias
        return (total + bias) << shift

    def read(self, total: int, num_rows: int) -> memoryview:
        """Return ONE times the predicted value, plus SUM_OFFSET, by expert."""
        return self._lanes.read(self.shifted_sum(total, num_rows, 0))

    def change(self, truth: int, total: int, num_rows: int, shift: int) -> int:
        """Return the row to add to each active row: (truth - predicted) / 2**shift, rounded."""
        biases = self._error_bias.get((num_rows, shift))
        if biases is None:
            half = 1 << shift >> 1
            before = self._lanes.ones * (num_rows * ROW_OFFSET + ERROR_OFFSET + half)
            biases = before, self._lanes.ones * (ERROR_OFFSET >> shift)
            self._error_bias[num_rows, shift] = biases
        before, after = biases
        return self._lanes.shifted(truth + before - total, shift) - after


@lru_cache(maxsize=4096)
def rate_shift(rate: float, num_rows: int) -> int:
    """Return the shift for which 1 / 2**shift is nearest to rate / num_rows; at most 16."""
    shift = 0
    while 1 << shift < num_rows / (1.4 * rate):
        shift += 1
    return min(shift, 16)


def sum_rows(table: Sequence[int], indices: Sequence[int]) -> int:
    """Return the sum of the table's rows at these indices."""
    return sum([table[idx] for idx in indices])
