"""The arguments of attention: a step's new tokens in one layer, and what they see."""

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from tandem.kernels.attention import AttentionForm, CachedAttention, DistanceBias


class NewCompressed(NamedTuple):
    """The compressed keys of a layer that a step adds."""

    ratio: int
    """Tokens per key."""
    key: Tensor
    """(1, n_tokens, dim): a key for each token, stored only if the token ends a window."""
    selected: Tensor | None
    """(b, n_tokens, most) int32: the numbers of the keys that each token sees, from
    `SlotCache.select`; None: all."""


class AttentionCall(NamedTuple):
    """A call of attention: queries, keys and values (heads, n_tokens, dim), in the step's order."""

    form: AttentionForm
    query: Tensor
    key: Tensor
    value: Tensor
    sinks: Tensor | None = None
    """The sinks' scores by head, (heads,), or by token, (n_tokens, heads)."""
    selected: Tensor | None = None
    """The positions or blocks that tokens see, from `SlotCache.select`: (n_tokens, most), or
    (n_tokens, kv heads, most) if each head selects; None: all."""
    compressed: NewCompressed | None = None
    """Compressed keys that tokens see besides a window; `selected` then refers to them."""
    bias: DistanceBias | None = None

    @property
    def token_sinks(self) -> Tensor | None:
        """`sinks` if each token has its own; otherwise None."""
        return self.sinks if self.sinks is not None and self.sinks.dim() == 2 else None

    @property
    def head_sinks(self) -> Tensor | None:
        """`sinks` if all tokens share them; otherwise None."""
        return self.sinks if self.sinks is not None and self.sinks.dim() == 1 else None

    def part(self, some: slice) -> "AttentionCall":
        """Return the call for a range of its tokens.

        The call must have no other optional tensor by token than `selected`.
        """
        query, key, value = (x[:, some] for x in (self.query, self.key, self.value))
        selected = None if self.selected is None else self.selected[some]
        return self._replace(query=query, key=key, value=value, selected=selected)

    @property
    def optional_tensors(self) -> list[Tensor]:
        """The call's optional tensors by token, in the order that `OptionalTensors.of` expects."""
        compressed = None if self.compressed is None else self.compressed.key
        states = None if self.bias is None else self.bias.states
        optional = (compressed, states, self.token_sinks, self.selected)
        return [x for x in optional if x is not None]


class OptionalTensors(NamedTuple):
    """The optional tensors of an attention call by name; CPU only.

    A layer has the same of these tensors in every call; only `selected` may come and go.
    """

    compressed: Tensor | None
    bias_states: Tensor | None
    sinks: Tensor | None
    selected: Tensor | None

    @classmethod
    def of(cls, attention: CachedAttention, tensors: Sequence[Tensor]) -> "OptionalTensors":
        """Return the tensors of `AttentionCall.optional_tensors` under their names.

        `tensors` must contain each tensor that `attention` expects; `selected` may follow.
        """
        rest = iter(tensors)
        compressed = None if attention.compressed is None else next(rest)
        states = next(rest) if attention.has_bias else None
        sinks = next(rest) if attention.has_token_sinks else None
        return cls(compressed, states, sinks, next(rest, None))

    def part(self, some: slice) -> "OptionalTensors":
        """Return the tensors for a range of their tokens."""
        return OptionalTensors(
            None if self.compressed is None else self.compressed[:, some],
            None if self.bias_states is None else self.bias_states[:, some],
            None if self.sinks is None else self.sinks[some],
            None if self.selected is None else self.selected[some],
        )
