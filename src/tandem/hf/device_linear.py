"""Linear layers whose packed weights lie on a GPU, where a decode step reads them as they are."""

import importlib.util
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from tandem.core.errors import ConfigError
from tandem.foreign_types import PreTrainedModel
from tandem.hf.dense import packable_layers, untie
from tandem.kernels.dense import pack_dense
from tandem.kernels.formats.weight_format import WeightFormat

if TYPE_CHECKING:
    from tandem.kernels.triton.dense import DeviceWeight


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
        from tandem.kernels.triton.dense import multiply

        return multiply(x, self.packed)

    @property
    def weight(self) -> Tensor:
        """The weight's place and dtype, for code that asks for these; it has no values."""
        shape = (self.out_features, self.in_features)
        return torch.empty((), dtype=self.dtype, device=self.packed.image.device).expand(shape)

    def extra_repr(self) -> str:
        """Show the shape and the format."""
        return f"{self.in_features}, {self.out_features}, {self.packed.format}"


def pack_on_device(model: PreTrainedModel, fmt: WeightFormat) -> int:
    """Replace a model's linear layers by packed ones where they lie; return the bytes of these.

    One by one, so that a layer in both forms is the most that is there. Routers, embeddings and
    towers for images stay, as on the CPU. Raises `ConfigError` without Triton.
    """
    if importlib.util.find_spec("triton") is None:
        raise ConfigError(
            f"dense_dtype is {fmt.name!r} and Triton, which would multiply with such weights on "
            "the GPU, is not installed; pip install triton, or leave dense_dtype out"
        )
    from tandem.kernels.triton.dense import bring

    num_bytes = 0
    for parent, name, linear in list(packable_layers(model)):
        device, dtype = linear.weight.device, linear.weight.dtype
        bias = None if linear.bias is None else linear.bias.detach().cpu()
        label = f"{type(parent).__name__}.{name}"
        packed = pack_dense(linear.weight.detach().cpu(), bias, fmt, name=label)
        setattr(parent, name, DeviceLinear(bring(packed, device), dtype))
        num_bytes += packed.num_bytes
    untie(model, DeviceLinear)
    return num_bytes
