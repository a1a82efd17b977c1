"""What attention is asked for: a step's new tokens of one layer, with what they see."""

from typing import NamedTuple

from torch import Tensor

from tandem.kernels.attention import AttentionForm


class AttentionCall(NamedTuple):
    """Queries, keys and values (heads, n_tokens, dim), in the order of the step."""

    form: AttentionForm
    query: Tensor
    key: Tensor
    value: Tensor
    sinks: Tensor | None = None
    selected: Tensor | None = None
    """(n_tokens, most): the positions that tokens see, as of `SlotCache.select`; None: all."""
