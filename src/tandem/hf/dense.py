"""Dense layers in packed formats: replaces a model's linear layers after they have been loaded.

Attention projections, shared experts, dense feed-forward layers and the output head; not routers,
whose few bytes decide everything, nor embeddings.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from tandem.core.errors import ConfigError
from tandem.core.registry import nearest_names
from tandem.hf.experts import is_experts_module
from tandem.hf.fusion import DENSE
from tandem.hf.step_recorder import opaque
from tandem.kernels.dense import VALUE_DTYPES, CpuThreads, DenseWeight, multiply, pack_dense
from tandem.kernels.formats.weight_format import ALIASES, FORMATS, WeightFormat, find_format
from tandem.offload.packed_layer import PackedLayer

# "auto" on the CPU, where experts are quantised too. Perplexity of the demo model with int4
# experts: 22.00 with dense layers as loaded, 21.99 with these, 22.10 in groups of 128.
DEFAULT_CPU_FORMAT = "int8-g32"

_ROUTER_NAMES = ("gate", "router", "router_proj", "shared_expert_gate")
# Smaller ones save nothing.
_LEAST_WEIGHTS = 1 << 14


def find_dense_format(name: str) -> WeightFormat | None:
    """Return the format of a `dense_dtype`; None leaves the weights as they are loaded."""
    if name == "none":
        return None
    names = [fmt.name for fmt in FORMATS] + list(ALIASES)
    if name == "auto":
        return find_format(DEFAULT_CPU_FORMAT)
    if name not in names:
        hint = nearest_names(name, ["auto", "none", *names])
        raise ConfigError(f"dense_dtype is {name!r}, which Tandem does not know; {hint}")
    return find_format(name)


class PackedLinear(nn.Module):
    """A linear layer whose weight is packed; its product runs on the experts' kernels."""

    def __init__(self, weight: DenseWeight, threads: CpuThreads, dtype: torch.dtype) -> None:
        """Compute with `threads`; `dtype` is that of the layer that it replaces."""
        super().__init__()
        self.packed = weight
        self.in_features, self.out_features = weight.in_features, weight.out_features
        self._threads = threads
        self._dtype = dtype

    def forward(self, x: Tensor) -> Tensor:
        """Return x @ weight.T + bias: (..., in_features) -> (..., out_features)."""
        if x.dtype not in VALUE_DTYPES:
            return self.forward(x.float()).to(x.dtype)
        out: Tensor = opaque(DENSE, _multiply_one, self._threads, self.packed, x)
        return out

    @property
    def weight(self) -> Tensor:
        """The unpacked weight, for code that looks at it. Slow."""
        return self.packed.values().to(self._dtype)

    @property
    def bias(self) -> Tensor | None:
        """The bias, for code that looks at it."""
        bias = self.packed.bias
        return None if bias is None else bias[: self.out_features].to(self._dtype)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        """Save the rounded weights under the names of the layer that was replaced."""
        destination[prefix + "weight"] = self.weight
        if self.bias is not None:
            destination[prefix + "bias"] = self.bias

    def extra_repr(self) -> str:
        """Show the shape and the format."""
        return f"{self.in_features}, {self.out_features}, {self.packed.matrix.format.name}"


def _multiply_one(threads: CpuThreads, weight: DenseWeight, x: Tensor) -> Tensor:
    return multiply(threads, [weight], x)[0]


def pack_dense_layers(model: Any, dense_dtype: str, threads: CpuThreads) -> int:
    """Replace a model's linear layers by packed ones, one by one; return the bytes of these.

    Only the layers of a model on the CPU; towers for images and sound stay. "auto" leaves a model
    whose experts are not quantised as it was loaded.
    """
    fmt = find_dense_format(dense_dtype)
    if fmt is None or model.device.type != "cpu":
        return 0
    if dense_dtype == "auto" and not _has_quantised_experts(model):
        return 0
    num_bytes = 0
    for parent, name, linear in list(packable_layers(model)):
        label = f"{type(parent).__name__}.{name}"
        packed = pack_dense(linear.weight, linear.bias, fmt, name=label)
        setattr(parent, name, PackedLinear(packed, threads, linear.weight.dtype))
        num_bytes += packed.num_bytes
    return num_bytes


def _has_quantised_experts(model: Any) -> bool:
    store = getattr(getattr(model, "hf_quantizer", None), "store", ())
    return any(isinstance(x, PackedLayer) and x.layout.format.bits <= 8 for x in store)


def packable_layers(model: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Linear]]:
    """Yield (parent, name, layer) of every linear layer that is worth packing."""
    for path, parent in model.named_modules():
        if is_experts_module(parent) or "vision" in path or "visual" in path or "audio" in path:
            continue
        for name, child in parent.named_children():
            is_plain = type(child) is nn.Linear and name not in _ROUTER_NAMES
            if is_plain and child.weight.numel() >= _LEAST_WEIGHTS:
                yield parent, name, child
