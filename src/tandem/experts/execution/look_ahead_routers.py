"""What a captured step needs to run the next layer's router ahead: a product and its top-k.

Before a bias is added, a monotonic scoring function may be applied to the products.
"""

from typing import NamedTuple

from torch import Tensor

SCORINGS = ("", "sigmoid", "sqrtsoftplus")
"""The kernels' numbering of scoring functions; the empty name means none."""


class LookAheadRouter(NamedTuple):
    """A layer's router, to be run on the previous layer's router input; both are on one device."""

    weight: Tensor  # (num_experts, hidden_size)
    bias: Tensor | None  # (num_experts,)
    residual: Tensor  # (hidden_size,) fp32, added to that state; may still be learned
    scoring: str = ""  # one of `SCORINGS`, applied before the bias
