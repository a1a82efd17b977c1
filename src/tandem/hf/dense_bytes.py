"""How much memory the parts of a model take that are no experts, and whether there is as much."""

from collections.abc import Mapping

from tandem.foreign_types import PreTrainedModel
from tandem.hf.dense import format_on_cpu, packable_layers, tied_weights
from tandem.hf.experts import is_experts_module
from tandem.kernels.formats.weight_format import WeightFormat


def dense_bytes_with(model: PreTrainedModel, formats: Mapping[str, WeightFormat | None]) -> int:
    """Return what the parts of a model that are no experts take while it loads.

    Weights with a format in `formats` are never there as numbers.
    """
    experts = {id(p) for m in model.modules() if is_experts_module(m) for p in m.parameters()}
    tied = tied_weights(model)
    tensors = (*model.named_parameters(), *model.named_buffers())
    own = ((name, t) for name, t in tensors if id(t) not in experts and name not in tied)
    return sum(
        tensor.nbytes if (fmt := formats.get(name)) is None else fmt.matrix_bytes(*tensor.shape)
        for name, tensor in own
    )


def packed_dense_bytes(model: PreTrainedModel, dense_dtype: str) -> int:
    """Return the same once `pack_dense_layers` has packed what it packs."""
    fmt = format_on_cpu(model, dense_dtype)  # None: as they are
    return dense_bytes_with(model, {f"{path}.weight": fmt for path, *_ in packable_layers(model)})


def short_memory(
    experts_bytes: int,
    dense_bytes: int,
    free_bytes: int,
    *,
    expert_memory_bytes: int | None,
    device_bytes: int | None,
) -> int | None:
    """Return what is free of a memory that does not hold its part of a model; None: all fits.

    `expert_memory_bytes` is what experts take at most, if the options say so; `device_bytes` what
    a GPU has free for the dense parts, if they go there.
    """
    if device_bytes is not None and dense_bytes > device_bytes:
        return device_bytes
    if expert_memory_bytes is not None:
        experts_bytes = min(experts_bytes, expert_memory_bytes)
    return None if experts_bytes + dense_bytes <= free_bytes else free_bytes
