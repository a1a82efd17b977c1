"""Linear layers on a GPU whose weights are packed; decode steps do not unpack them."""

from collections.abc import Callable
from functools import cached_property, partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from tandem.kernels.dense import DenseWeight

if TYPE_CHECKING:
    from tandem.triton_kernels.dense import DeviceWeight


class DeviceLinear(nn.Module):
    """A linear layer whose weight is packed on a device; Triton multiplies."""

    def __init__(
        self,
        weight: "DeviceWeight",
        values_dtype: torch.dtype,
        input_order: Tensor | None = None,
    ) -> None:
        """Take a packed weight; `values_dtype` is the dtype of the layer that this one replaces.

        `input_order` (in_features,), on the device, has the number of the input that each column of
        the weight multiplies; None: columns are in the inputs' order.
        """
        super().__init__()
        self.packed = weight
        self.in_features, self.out_features = weight.in_features, weight.out_features
        self.dtype, self.input_order = values_dtype, input_order
        self.num_groups = 1

    def cut(self, num_groups: int) -> None:
        """Split the weight's rows into groups; `forward` then takes an input for each group."""
        self.num_groups = num_groups

    def forward(self, x: Tensor) -> Tensor:
        """Return x @ weight.T + bias: (..., in_features) -> (..., out_features).

        After `cut`: (..., groups, in_features) -> (..., groups, outputs of a group).
        """
        from tandem.triton_kernels.dense import multiply

        if self.num_groups > 1:
            weight = self.unpacked.unflatten(0, (self.num_groups, -1))
            return torch.matmul(weight, x[..., None])[..., 0]
        if self.input_order is not None:
            x = x.index_select(-1, self.input_order)
        return multiply(x, self.packed)

    def on_host(self) -> DenseWeight:
        """Return a copy of the packed weight in host memory."""
        from tandem.triton_kernels.dense import fetch

        return fetch(self.packed)

    @property
    def bias(self) -> Tensor | None:
        """A copy of the bias in host memory; None if the layer has no bias."""
        return self.on_host().bias if self.packed.has_bias else None

    @cached_property
    def unpacked(self) -> Tensor:
        """The unpacked weight (out_features, in_features) on the device, unpacked on first use.

        For code that multiplies the weight's heads or groups separately.
        """
        values = self.on_host().values()
        if self.input_order is not None:
            values = values[:, self.input_order.cpu().argsort()]
        return values.to(self.packed.image.device, self.dtype)

    @property
    def weight(self) -> Tensor:
        """A tensor without values, for code that inspects the weight's shape, dtype and device."""
        shape = (self.out_features, self.in_features)
        return torch.empty((), dtype=self.dtype, device=self.packed.image.device).expand(shape)

    def extra_repr(self) -> str:
        """Show the shape and the format."""
        return f"{self.in_features}, {self.out_features}, {self.packed.format}"


def linear_compilations(model: nn.Module, device: torch.device) -> list[Callable[[], None]]:
    """Return callables that compile the kernels of a model's packed linear layers.

    The compiled kernels serve any number of tokens.
    """
    from tandem.triton_kernels.rows import TILE_ROWS, VECTOR_TOKENS

    # Layers of one kind share kernels: Triton compiles by whether shapes are multiples of 16.
    kinds = {
        (m.packed.format, m.dtype, m.in_features % 16 == 0, m.out_features % 16 == 0): m
        for m in model.modules()
        if isinstance(m, DeviceLinear) and m.packed.image.device == device
    }
    sizes = (*VECTOR_TOKENS, *TILE_ROWS)
    return [partial(_launch_once, layer, size) for layer in kinds.values() for size in sizes]


def _launch_once(layer: DeviceLinear, num_tokens: int) -> None:
    device = layer.packed.image.device
    layer(torch.zeros(num_tokens, layer.in_features, dtype=layer.dtype, device=device))
