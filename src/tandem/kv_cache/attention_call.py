"""What attention is asked for: a step's new tokens of one layer, with what they see."""

from typing import NamedTuple

from torch import Tensor

from tandem.kernels.attention import AttentionForm


class NewCompressed(NamedTuple):
    """The keys that a layer keeps for every so many tokens of a slot, as a step brings them."""

    ratio: int
    """Tokens that a key stands for."""
    key: Tensor
    """(1, n_tokens, dim); those of tokens that end no window are not kept."""
    selected: Tensor | None
    """(b, n_tokens, most) int32: the keys that tokens see, as of `SlotCache.select`; None: all."""


class AttentionCall(NamedTuple):
    """Queries, keys and values (heads, n_tokens, dim), in the order of the step."""

    form: AttentionForm
    query: Tensor
    key: Tensor
    value: Tensor
    sinks: Tensor | None = None
    selected: Tensor | None = None
    """(n_tokens, most): the positions that tokens see, as of `SlotCache.select`; None: all."""
    compressed: NewCompressed | None = None
    """What tokens see beside a window; then these keys are what is selected."""
