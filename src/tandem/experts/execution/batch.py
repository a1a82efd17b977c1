"""A call of a layer, and its batches: experts that one processor computes together."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from torch import Tensor

from tandem.experts.store.host_store import HostLayer
from tandem.kernels.native import NativeActivation


class RoutedCall(NamedTuple):
    """One call of a layer: its tokens and what the router chose for them."""

    layer: int
    hidden: Tensor  # (n_tokens, hidden_size)
    top_k_index: Tensor  # (n_tokens, top_k)
    top_k_weights: Tensor  # (n_tokens, top_k)

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        """The call's tensors: tokens, choice and weights."""
        return self[1:]

    def detached(self) -> "RoutedCall":
        """Return the call with detached tensors; the call itself if none requires gradients."""
        if not (self.hidden.requires_grad or self.top_k_weights.requires_grad):
            return self  # this check costs less than detaching
        layer, hidden, index, weights = self
        return RoutedCall(layer, hidden.detach(), index, weights.detach())


@dataclass(frozen=True, slots=True)
class ExpertFunctions:
    """The functions around an expert's two matrix products, from the model's own code.

    `native` is the activation in the form that the kernels take; None if they do not support it.
    `unpacked_activate` is the activation for inputs [gate; up], whatever order `activate` expects;
    None: `activate` itself.
    """

    activate: Callable[[Tensor], Tensor]
    post_norm: Callable[[Tensor], Tensor] | None = None
    native: NativeActivation | None = None
    unpacked_activate: Callable[[Tensor], Tensor] | None = None


class CallSide:
    """A call's tokens and its rows of results, both in the memory of one processor."""

    __slots__ = ("_hidden_fp32", "hidden", "rows")

    def __init__(self, hidden: Tensor, rows: Tensor) -> None:
        """Read `hidden` (n_tokens, hidden_size), write `rows` (num_routed, hidden_size) fp32."""
        self.hidden = hidden
        self.rows = rows
        self._hidden_fp32: Tensor | None = None

    @property
    def hidden_fp32(self) -> Tensor:
        """The tokens in fp32, converted at the first access."""
        if self._hidden_fp32 is None:
            self._hidden_fp32 = self.hidden.float().contiguous()
        return self._hidden_fp32


@dataclass(slots=True)
class ExpertBatch:
    """Experts of a layer that one processor computes, and their routed tokens. Read-only.

    Expert `experts[i]` has rows `begin[i]`..`begin[i + 1]` - 1 of the call. `token` and `out` have
    only this batch's rows: there, the expert's rows begin at `begin[i] - begin[0]`.
    """

    layer: HostLayer
    functions: ExpertFunctions
    side: CallSide  # of the computing processor
    experts: Sequence[int]
    begin: Sequence[int]
    # The token of each row: int32, contiguous, on the host. May include other batches' rows.
    tokens: Tensor
    first_token: int  # position of this batch's first token in `tokens`

    def by_expert(self) -> Iterator["ExpertBatch"]:
        """Yield a batch of one expert for each expert of this batch."""
        for i, expert in enumerate(self.experts):
            first = self.first_token + self.begin[i] - self.begin[0]
            begin = self.begin[i : i + 2]
            yield replace(self, experts=[expert], begin=begin, first_token=first)

    @property
    def num_routed(self) -> int:
        """The number of this batch's routed tokens."""
        return self.begin[-1] - self.begin[0]

    @property
    def token(self) -> Tensor:
        """For each routed token, the index of its token: (num_routed,) int32, on the host."""
        return self.tokens[self.first_token : self.first_token + self.num_routed]

    @property
    def out(self) -> Tensor:
        """The batch's result: (num_routed, hidden_size) fp32, a range of the side's rows."""
        return self.side.rows[self.begin[0] : self.begin[-1]]

    @property
    def hidden(self) -> Tensor:
        """All tokens of the call (n_tokens, hidden_size) in the model's dtype."""
        return self.side.hidden

    @property
    def hidden_fp32(self) -> Tensor:
        """All tokens of the call in fp32."""
        return self.side.hidden_fp32
