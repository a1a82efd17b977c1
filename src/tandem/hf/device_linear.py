"""Packs a model's linear layers where they lie on a GPU."""

import importlib.util

from tandem.core.errors import ConfigError
from tandem.devices.cuda.linear import DeviceLinear
from tandem.foreign_types import PreTrainedModel
from tandem.hf.dense import packable_layers, untie
from tandem.kernels.dense import pack_dense
from tandem.kernels.formats.weight_format import WeightFormat


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
    from tandem.triton_kernels.dense import bring

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
