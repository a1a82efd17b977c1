"""What a captured step needs to ask the next layer's router: a product, and its largest values.

If a bias follows a function of the scores, that function must be monotonic.
"""

from typing import NamedTuple

from torch import Tensor

SCORINGS = ("", "sigmoid", "sqrtsoftplus")
"""The kernels' numbering of scoring functions; the empty name means none."""


class AskedRouter(NamedTuple):
    """A layer's router, which gets the state of the layer before it; both are on the same
    device.
    """

    weight: Tensor  # (num_experts, hidden_size)
    bias: Tensor | None  # (num_experts,)
    residual: Tensor  # (hidden_size,) fp32, added to that state; may still be learned
    scoring: str = ""  # one of `SCORINGS`, applied before the bias
