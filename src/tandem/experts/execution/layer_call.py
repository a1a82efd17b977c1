"""One call of a layer: its routed tokens in the order of a plan, split into batches, and summed.

A routed token has one row in each matrix. Rows are grouped by processor. A processor with memory of
its own has its own `CallSide`, whose rows have the same indices as the other side's: the host's
rows are copied to the device at once, and the sum is computed where the model's state is.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from tandem.experts.execution.batch import CallSide, ExpertBatch, ExpertFunctions
from tandem.experts.execution.routing import PrepareSum, Routing
from tandem.experts.store.host_store import HostLayer


class LayerCall:
    """A call's routed tokens, sorted by expert, from which batches are made.

    Each batch fills a contiguous range of rows.
    """

    __slots__ = ("_functions", "_order", "_rows", "host", "routing")

    def __init__(
        self, host: HostLayer, functions: ExpertFunctions, routing: Routing, order: Sequence[int]
    ) -> None:
        """Sort the routed tokens by `order`, which must contain all active experts."""
        self.host = host
        self.routing = routing
        self._functions = functions
        self._order = order
        self._rows = routing.sorted_by(order)

    def batch(self, first: int, last: int, side: CallSide) -> ExpertBatch:
        """Return the batch of the experts at positions first .. last - 1 of the order."""
        token, first_token = self._rows.token, self._rows.begin[first]
        experts, begin = self._order[first:last], self._rows.begin[first : last + 1]
        if self.host.input_order is not None:
            own, first_token = token[first_token : begin[-1]], 0
            hidden, token = _ordered(side.hidden, self.host.input_order, experts, begin, own)
            side = CallSide(hidden, side.rows)
        return ExpertBatch(self.host, self._functions, side, experts, begin, token, first_token)

    def first_row(self, place: int) -> int:
        """Return the first row of the expert at position `place` of the order."""
        return self._rows.begin[place]

    def prepare_result(
        self, side: CallSide, top_k_weights: Tensor, prepare_sum: PrepareSum
    ) -> Callable[[], Tensor]:
        """Return a function that returns the weighted sums (n_tokens, hidden_size).

        The function must not be called before all rows are on `side`. The fp32 additions are in the
        router's order, first to last, so that either processor gives the same bits.
        """
        post_norm, dtype = self._functions.post_norm, side.hidden.dtype
        sum_rows = prepare_sum(self._rows.row_of, top_k_weights.float())

        def result() -> Tensor:
            rows = side.rows
            if post_norm is not None:
                rows = post_norm(rows.to(dtype)).float()
            return sum_rows(rows).to(dtype)

        return result


def _ordered(
    hidden: Tensor,
    input_order: Tensor,
    experts: Sequence[int],
    begin: Sequence[int],
    token: Tensor,
) -> tuple[Tensor, Tensor]:
    """Return a batch's inputs in activation order (GPTQ's), and the row of each routed token.

    The inputs (n_rows, hidden_size) have a row per routed token instead of per token, so the
    rows are 0..n_rows - 1, int32. Inputs are copied; weights stay as in the checkpoint.
    """
    counts = torch.tensor([begin[i + 1] - begin[i] for i in range(len(experts))], device="cpu")
    expert_of_row = torch.tensor(experts, device="cpu").repeat_interleave(counts)
    inputs = input_order[expert_of_row].long().to(hidden.device)  # (n_rows, hidden_size)
    rows = hidden[token.long().to(hidden.device)].gather(1, inputs)
    return rows, torch.arange(len(rows), dtype=torch.int32, device="cpu")
