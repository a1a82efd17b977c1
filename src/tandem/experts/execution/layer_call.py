"""One call of a layer: its routed tokens in the order of a plan, split into batches, and summed.

A routed token has one row in each matrix. Rows are grouped by processor. A processor with memory of
its own has its own `CallSide`, whose rows have the same indices as the other's: the host's rows go
to the device in one copy, and the sum is computed in the memory of the model's state.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from tandem.experts.execution.batch import CallSide, ExpertBatch, ExpertFunctions
from tandem.experts.execution.routing import PrepareSum, Routing
from tandem.experts.store.host_store import HostLayer


class LayerCall:
    """What all batches of a call share; each batch fills a contiguous range of its side's rows."""

    __slots__ = ("_functions", "_order", "_rows", "host", "routing")

    def __init__(
        self, host: HostLayer, functions: ExpertFunctions, routing: Routing, order: Sequence[int]
    ) -> None:
        """Lay out the routed tokens with the active experts in this order."""
        self.host = host
        self.routing = routing
        self._functions = functions
        self._order = order
        self._rows = routing.sorted_by(order)

    def batch(self, first: int, last: int, side: CallSide) -> ExpertBatch:
        """Return the batch of experts first .. last - 1 of the order, on a side."""
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
        """Return what gives the weighted sums (n_tokens, hidden_size) once all rows are on a side.

        A fixed order of fp32 additions, the router's first to last: the same bits on either
        processor.
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
    """Return inputs in the order of experts' codes (GPTQ's activation order), and int32 numbers.

    There is a row (n_rows, hidden_size) for each (token, expert) instead of one for each token.
    That copies these rows, but the weights stay as they are in the checkpoint.
    """
    counts = torch.tensor([begin[i + 1] - begin[i] for i in range(len(experts))], device="cpu")
    expert_of_row = torch.tensor(experts, device="cpu").repeat_interleave(counts)
    inputs = input_order[expert_of_row].long().to(hidden.device)  # (n_rows, hidden_size)
    rows = hidden[token.long().to(hidden.device)].gather(1, inputs)
    return rows, torch.arange(len(rows), dtype=torch.int32, device="cpu")
