"""One call of a layer: its rows in the order of a plan, cut into batches, and added up."""

from collections.abc import Sequence

from torch import Tensor

from tandem.offload.batch import ExpertBatch, ExpertFunctions
from tandem.offload.host_store import HostLayer
from tandem.offload.routing import AddRows, Routing, add_rows


class LayerCall:
    """What all batches of a call share; each batch fills a contiguous piece of the rows."""

    def __init__(
        self,
        host: HostLayer,
        functions: ExpertFunctions,
        hidden: Tensor,
        routing: Routing,
        order: Sequence[int],
        computed: Tensor,
    ) -> None:
        """Lay the rows out with the active experts in this order; `hidden` is on the CPU.

        `computed` (routing.num_rows, hidden_size) fp32 takes the rows.
        """
        self.host = host
        self.routing = routing
        self._functions = functions
        self._hidden = hidden
        self._hidden_fp32 = hidden.float()
        self._order = order
        self._rows = routing.rows(order)
        self._computed = computed

    def batch(self, first: int, last: int) -> ExpertBatch:
        """Return the batch of the order's experts first .. last - 1."""
        begin, token = self._rows.begin, self._rows.token
        start, end = begin[first], begin[last]
        is_whole = end - start == len(token)
        computed = self._computed
        return ExpertBatch(
            self.host,
            self._functions,
            self._hidden,
            self._hidden_fp32,
            self._order[first:last],
            begin[first : last + 1],
            token if is_whole else token[start:end],
            computed if is_whole else computed[start:end],
        )

    def result(self, top_k_weights: Tensor, add: AddRows) -> Tensor:
        """Return the weighted sums (n_tokens, hidden_size), once all batches are done."""
        computed, post_norm = self._computed, self._functions.post_norm
        if post_norm is not None:
            computed = post_norm(computed.to(self._hidden.dtype)).float()
        return add_rows(computed, self._rows, top_k_weights, add).to(self._hidden.dtype)
