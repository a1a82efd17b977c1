"""What a captured step asks the next layer's router with: a product, and the largest of it.

Of the scores by a function of its sums that only grows, where a bias comes behind that.
"""

from typing import NamedTuple

from torch import Tensor

SCORINGS = ("", "sigmoid", "sqrtsoftplus")
"""Names of these functions, as kernels number them; the first is none."""


class AskedRouter(NamedTuple):
    """A layer's router, asked with the state of the layer before it; all where the state lies."""

    weight: Tensor  # (num_experts, hidden_size)
    bias: Tensor | None  # (num_experts,)
    residual: Tensor  # (hidden_size,) fp32, added to that state; may be learned meanwhile
    scoring: str = ""  # of `SCORINGS`, ahead of the bias
