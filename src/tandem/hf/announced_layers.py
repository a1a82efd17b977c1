"""Adds a model's MoE layers to the host store before weights are read; checks that they fit."""

from collections.abc import Iterator

import torch

from tandem.core.units import format_bytes
from tandem.experts.store import host_memory
from tandem.experts.store.arrivals import TENSOR_NAMES
from tandem.experts.store.host_store import HostLayer, HostStore
from tandem.foreign_types import ModelPart
from tandem.hf.config import parse_expert_dtype, stored_format
from tandem.hf.experts import num_spare_experts
from tandem.kernels.formats.weight_format import ExpertFormat

# Formats that an error suggests when the experts do not fit, largest first.
SMALLER_FORMATS = ("bf16", "int8", "int4")


def announce(
    store: HostStore,
    name: str,
    module: ModelPart,
    expert_dtype: torch.dtype | ExpertFormat | None,
) -> HostLayer:
    """Add an experts module's layer to a store, with shapes but no weights yet; return the layer.

    If `expert_dtype` is None, the experts keep the module's dtype.
    """
    shapes = {p: tuple(t.shape) for p, t in module.named_parameters(recurse=False)}
    return store.add_layer(
        name,
        {p: shape for p, shape in shapes.items() if p in TENSOR_NAMES},
        expert_dtype=stored_format(expert_dtype, module.down_proj.dtype),
        is_transposed=bool(module.is_transposed),
        is_interleaved=bool(module.has_gate and not module.is_concatenated),
        num_spare=num_spare_experts(module),
    )


def source_dtype_of(experts: dict[str, ModelPart], default: torch.dtype) -> torch.dtype:
    """Return the dtype of the experts modules' parameters; `default` if there are no modules."""
    return next((module.down_proj.dtype for module in experts.values()), default)


def room_left(
    store: HostStore, modules: dict[str, ModelPart], dense_bytes: int, dtype: torch.dtype
) -> int:
    """Return the bytes of host memory that stay free after loading a model.

    Must be called before weights are read. `dense_bytes` is the size of the model's dense parts.
    Raises `CapacityError` if the model does not fit; the error names formats that would fit.
    """
    source_dtype = source_dtype_of(modules, dtype)
    needed = store.expected_bytes(source_dtype) + dense_bytes
    available = host_memory.available_bytes()
    if needed > available:
        formats = " and ".join(_fitting_formats(modules, source_dtype, dense_bytes, available))
        what = "the model's experts and dense parts" if modules else "the model's weights"
        host_memory.require_host_memory(needed, available, what=what, formats=formats)
    return available - needed


def _fitting_formats(
    modules: dict[str, ModelPart], source_dtype: torch.dtype, dense_bytes: int, available: int
) -> Iterator[str]:
    for name in SMALLER_FORMATS:
        smaller = HostStore()
        for module_name, module in modules.items():
            announce(smaller, module_name, module, parse_expert_dtype(name))
        size = smaller.expected_bytes(source_dtype) + dense_bytes
        if size <= available:
            yield f"expert_dtype={name!r} takes {format_bytes(size)}"
