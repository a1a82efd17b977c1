"""Packed linear layers where a model's dense parts are: on the CPU, or on a GPU."""

import importlib.util
from collections.abc import Callable, Collection, Iterator

import torch
from torch import Tensor, nn

from tandem.core.errors import ConfigError
from tandem.devices.cuda.linear import DeviceLinear
from tandem.hf.dense import PackedLinear, packable_layers, untie
from tandem.kernels.dense import CpuThreads, DenseWeight, pack_dense
from tandem.kernels.formats.weight_format import WeightFormat

Place = Callable[[DenseWeight, torch.dtype, Tensor | None], nn.Module]
"""Makes the layer of a weight, of its values' dtype and the order of its inputs."""


# Latent attention multiplies with them by head, as numbers: packed they would be there twice.
_READ_BY_HEAD = ("kv_b_proj",)


def device_layers(model: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Linear]]:
    """Yield (parent, name, layer) of every linear layer that is worth packing for a GPU."""
    return (found for found in packable_layers(model) if found[1] not in _READ_BY_HEAD)


def has_kernels() -> bool:
    """Whether a GPU can multiply with packed weights: Triton is installed."""
    return importlib.util.find_spec("triton") is not None


def on_cpu(threads: CpuThreads) -> Place:
    """Return what makes layers that some threads multiply."""
    return lambda weight, dtype, order: PackedLinear(weight, threads, dtype, order)


def on_device(device: torch.device) -> Place:
    """Return what brings weights to a GPU, which raises `ConfigError` without Triton."""

    def place(weight: DenseWeight, dtype: torch.dtype, order: Tensor | None) -> nn.Module:
        if not has_kernels():
            raise ConfigError(
                "linear layers are packed and Triton, which would multiply with such weights on "
                "the GPU, is not installed; pip install triton, or leave dense_dtype out"
            )
        from tandem.triton_kernels.dense import bring

        there = None if order is None else order.to(device)
        return DeviceLinear(bring(weight, device), dtype, there)

    return place


def where(device: torch.device, threads: CpuThreads) -> Place:
    """Return what makes packed layers beside a model's other dense parts."""
    return on_cpu(threads) if device.type == "cpu" else on_device(device)


def pack_for_device(
    model: nn.Module, fmt: WeightFormat, place: Place, kept: Collection[str] = ()
) -> int:
    """Replace a model's linear layers by packed ones on a GPU; return the bytes of these.

    They are packed on the host, one by one. Those at the paths `kept`, what is read by head,
    routers, embeddings and towers for images stay. Raises `ConfigError` without Triton.
    """
    num_bytes, paths = 0, {id(module): path for path, module in model.named_modules()}
    for parent, name, linear in list(device_layers(model)):
        if paths[id(linear)] in kept:
            continue
        dtype = linear.weight.dtype
        bias = None if linear.bias is None else linear.bias.detach().cpu()
        label = f"{type(parent).__name__}.{name}"
        packed = pack_dense(linear.weight.detach().cpu(), bias, fmt, name=label)
        setattr(parent, name, place(packed, dtype, None))
        num_bytes += packed.num_bytes
    untie(model, DeviceLinear)
    return num_bytes
