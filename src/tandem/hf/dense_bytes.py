"""Counts the bytes that a model takes apart from its experts, and checks that memory suffices."""

from collections.abc import Iterator, Mapping

from torch import nn

from tandem.experts.store.host_store import HostStore
from tandem.foreign_types import PreTrainedModel
from tandem.hf.compat import parts_in_fp32
from tandem.hf.config import OffloadConfig, parse_dense_dtype
from tandem.hf.dense import format_on_cpu, has_quantised_experts, packable_layers, tied_weights
from tandem.hf.experts import is_experts_module
from tandem.hf.packed_layers import is_packable_embedding
from tandem.kernels.formats.weight_format import WeightFormat


def dense_bytes_with(model: PreTrainedModel, formats: Mapping[str, WeightFormat | None]) -> int:
    """Return the bytes that a model takes while it loads, apart from experts.

    Weights with a format in `formats` (by name) count as packed: they never exist unpacked.
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
    """Return a model's bytes, without experts, as they will be after `pack_dense_layers`."""
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
    """Return the free bytes of the memory that is too small for a model; None: the model fits.

    This is the GPU's memory or, if the GPU's suffices, the host's.
    `expert_memory_bytes` is the limit for experts, if the options set one. `device_bytes` are the
    free bytes of a GPU, if the dense parts are placed there.
    """
    if device_bytes is not None and dense_bytes > device_bytes:
        return device_bytes
    if expert_memory_bytes is not None:
        experts_bytes = min(experts_bytes, expert_memory_bytes)
    return None if experts_bytes + dense_bytes <= free_bytes else free_bytes


def layer_formats(
    model: nn.Module,
    store: HostStore,
    offload: OffloadConfig,
    codes: Mapping[str, WeightFormat | None],
    *,
    on_device: bool,
) -> dict[str, WeightFormat]:
    """Return the formats, by path, of the linear layers and embeddings that will be packed.

    `codes` has, by weight, the formats that keep a quantised checkpoint's codes. `on_device` says
    that the linear layers are for a GPU.
    """
    fmt, is_auto = parse_dense_dtype(offload.dense_dtype), offload.dense_dtype == "auto"
    # A dense model keeps its codes, if it has any.
    is_quantised = has_quantised_experts(store) or any(codes.values())
    if fmt is None or (is_auto and not is_quantised):
        return {}
    kept = {name.removesuffix(".weight"): own for name, own in codes.items() if own is not None}
    layers = packable_layers(model, on_device=on_device)
    formats: dict[str, WeightFormat | None] = dict.fromkeys((path for path, *_ in layers), fmt)
    formats |= {p: parse_dense_dtype(name) for p, name in (offload.dense_formats or {}).items()}
    return {path: own for path, own in formats.items() if own is not None} | kept


def dense_parts(model: nn.Module, packed: Mapping[str, WeightFormat]) -> Iterator[tuple[str, int]]:
    """Yield (name, bytes) of a model's weights and buffers, except those of its experts.

    `packed` maps the paths of packed layers to formats. Tied weights in the same form count once.
    """
    experts = {id(p) for m in model.modules() if is_experts_module(m) for p in m.parameters()}
    in_fp32 = parts_in_fp32(model)
    seen: set[int] = set()
    seen_packed: set[int] = set()  # a tied head and embeddings in the same format count once
    for path, module in model.named_modules():
        if path in packed:
            fmt, weight = packed[path], module.get_parameter("weight")
            if id(weight) not in seen_packed:
                seen_packed.add(id(weight))
                yield (
                    f"{path}.weight",
                    fmt.matrix_bytes(*weight.shape),
                )
            continue
        own = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
        for name, tensor in own:
            if id(tensor) not in experts and id(tensor) not in seen:
                seen.add(id(tensor))
                itemsize = 4 if any(word in f"{path}.{name}" for word in in_fp32) else 0
                yield f"{path}.{name}", tensor.numel() * max(itemsize, tensor.itemsize)


def embedding_bytes(model: PreTrainedModel, packed: Mapping[str, WeightFormat]) -> tuple[int, bool]:
    """Return the bytes of embeddings on the host, and whether a tied head has its own copy.

    The bytes are 0 if the embeddings must be on the GPU: a head that is tied to them is not packed,
    or their forward does more than `is_packable_embedding` allows.
    """
    embeddings = model.get_input_embeddings()
    path = next(path for path, module in model.named_modules() if module is embeddings)
    parameters = model.named_parameters(remove_duplicate=False)
    tied = [name.removesuffix(".weight") for name, p in parameters if p is embeddings.weight]
    if path in packed:
        shape, fmt = embeddings.weight.shape, packed[path]
        return fmt.matrix_bytes(*shape), len(tied) > 1
    is_alone = is_packable_embedding(embeddings) and all(n in packed for n in tied if n != path)
    return (embeddings.weight.nbytes if is_alone else 0), False


def device_bytes(model: PreTrainedModel, packed: Mapping[str, WeightFormat]) -> int:
    """Return the bytes of the dense parts on a GPU, without embeddings that stay on the host."""
    on_host, is_head_apart = embedding_bytes(model, packed)
    return sum(size for _, size in dense_parts(model, packed)) - (0 if is_head_apart else on_host)
