"""A linear layer whose packed weight lies on a GPU, where a decode step reads it as it is."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from tandem.triton_kernels.dense import DeviceWeight


class DeviceLinear(nn.Module):
    """A linear layer whose weight is packed on a device; Triton multiplies."""

    def __init__(self, weight: "DeviceWeight", values_dtype: torch.dtype) -> None:
        """Take a weight; `values_dtype` is that of the layer that it replaces."""
        super().__init__()
        self.packed = weight
        self.in_features, self.out_features = weight.in_features, weight.out_features
        self.dtype = values_dtype

    def forward(self, x: Tensor) -> Tensor:
        """Return x @ weight.T + bias: (..., in_features) -> (..., out_features)."""
        from tandem.triton_kernels.dense import multiply

        return multiply(x, self.packed)

    @property
    def weight(self) -> Tensor:
        """The weight's place and dtype, for code that asks for these; it has no values."""
        shape = (self.out_features, self.in_features)
        return torch.empty((), dtype=self.dtype, device=self.packed.image.device).expand(shape)

    def extra_repr(self) -> str:
        """Show the shape and the format."""
        return f"{self.in_features}, {self.out_features}, {self.packed.format}"
