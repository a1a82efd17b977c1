"""What a captured step asks the next layer's router with: a product, and the largest of it."""

from typing import NamedTuple

from torch import Tensor


class AskedRouter(NamedTuple):
    """A layer's router, asked with the state of the layer before it; all where the state lies."""

    weight: Tensor  # (num_experts, hidden_size)
    bias: Tensor | None  # (num_experts,)
    residual: Tensor  # (hidden_size,) fp32, added to that state; may be learned meanwhile
