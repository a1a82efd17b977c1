"""Packs a model's linear layers after they have been loaded.

These are attention projections, shared experts, dense feed-forward layers and the output head.
Embeddings are packed only if a recipe names them. Routers stay as loaded, because their few bytes
decide which experts compute.
"""

import importlib.util
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import partial
from typing import cast

import torch
from torch import Tensor, nn

from tandem.core.errors import ConfigError
from tandem.devices.cuda.embedding import HostEmbedding
from tandem.devices.cuda.linear import DeviceLinear
from tandem.experts.store.host_store import HostLayer
from tandem.experts.store.packed_layer import PackedLayer
from tandem.foreign_types import ModelPart, PreTrainedModel
from tandem.hf.config import parse_dense_dtype, plain_name, stored_format
from tandem.hf.experts import is_experts_module
from tandem.hf.packed_layers import (
    PackedEmbedding,
    PackedLinear,
    PackedModule,
    is_packable_embedding,
)
from tandem.hf.router_layers import router_layers
from tandem.hf.runtime import importance_of, runtime_of
from tandem.kernels.dense import CpuThreads, DenseWeight, pack_dense
from tandem.kernels.formats.weight_format import WeightFormat, find_format
from tandem.kernels.grouped import cut_like, is_grouped

# A layer with less weights than this many rows of hidden states saves nothing by packing.
_LEAST_ROWS = 4
# Latent attention multiplies with their values by head. If they were packed on a GPU, it would hold
# them twice.
_READ_BY_HEAD = ("kv_b_proj",)

Place = Callable[[DenseWeight, torch.dtype, Tensor | None], nn.Module]
"""Builds a packed layer from a weight, the replaced layer's dtype and the weight's input order."""


def pack_dense_layers(model: PreTrainedModel, dense_dtype: str, threads: CpuThreads) -> int:
    """Replace a model's linear layers by packed layers, one by one; return the packed bytes.

    Layers on a GPU and towers for images and sound are left out. "auto" changes nothing unless the
    model's experts (in a dense model: linear layers) are quantised. Packed layers stay as they are.
    """
    fmt = format_on_cpu(model, dense_dtype)
    return 0 if fmt is None else _pack_here(model, lambda dtype: fmt, threads)


def pack_by_path(model: PreTrainedModel, formats: Mapping[str, str], threads: CpuThreads) -> None:
    """Pack, on the CPU, the linear layers and embeddings that a recipe names, each in its format.

    Raises `ConfigError` for a path without such a layer.
    """
    parsed = {path: fmt for path, name in formats.items() if (fmt := parse_dense_dtype(name))}
    packed = {path for path, m in model.named_modules() if isinstance(m, PackedModule)}
    linear = {at[0]: at for at in packable_layers(model) if at[0] in parsed}
    modules = dict(model.named_modules())
    for path, fmt in parsed.items():
        module = modules.get(path)
        if path in linear:
            _replace(model, [linear[path]], partial(_always, fmt), on_cpu(threads))
        elif isinstance(module, nn.Embedding) and is_packable_embedding(module):
            weight = module.weight.detach()
            embedding = PackedEmbedding(pack_dense(weight, None, fmt, name=path), threads, module)
            model.set_submodule(path, embedding)
        elif path not in packed:
            raise ConfigError(
                f"dense_formats names {path!r}, where the model has no linear layer that can be "
                "packed; use the recipe of this model"
            )


def _always(fmt: WeightFormat, dtype: torch.dtype) -> WeightFormat:
    return fmt


def format_on_cpu(model: PreTrainedModel, dense_dtype: str) -> WeightFormat | None:
    """Return the format in which `pack_dense_layers` packs a model; None if it packs nothing."""
    fmt = parse_dense_dtype(dense_dtype)
    if fmt is None or model.device.type != "cpu":
        return None
    return fmt if plain_name(dense_dtype) != "auto" or is_quantised(model) else None


def is_quantised(model: PreTrainedModel) -> bool:
    """Whether a model has quantised experts; for a dense model, quantised linear layers."""
    runtime = runtime_of(model)
    if runtime is None or not len(runtime.store):
        kinds = (PackedLinear, DeviceLinear)
        layers = (module for module in model.modules() if isinstance(module, kinds))
        return any(_has_few_bits(format_of(layer)) for layer in layers)
    return has_quantised_experts(runtime.store)


def format_of(layer: PackedLinear | DeviceLinear) -> WeightFormat:
    """Return the format of a packed layer's weight, on any device."""
    packed = layer.packed
    return packed.matrix.format if isinstance(packed, DenseWeight) else find_format(packed.format)


def pack_as_loaded(model: PreTrainedModel, threads: CpuThreads) -> int:
    """Pack bf16 and fp16 linear layers without changing values; return their bytes.

    Torch's order of additions depends on the batch size; packed kernels are batch-invariant. fp32
    layers stay unpacked, because packing would round them.
    """
    if model.device.type != "cpu":
        return 0

    def same(dtype: torch.dtype) -> WeightFormat | None:
        fmt = stored_format(None, dtype)
        return fmt if isinstance(fmt, WeightFormat) else None

    return _pack_here(model, same, threads)


def pack_for_device(
    model: nn.Module, fmt: WeightFormat, place: Place, kept: Collection[str] = ()
) -> int:
    """Replace a model's linear layers by packed layers on a GPU; return the packed bytes.

    The layers are packed on the host, one by one. Routers, embeddings, towers, layers that latent
    attention reads by head, and layers at the paths `kept` stay as they are. Raises `ConfigError`
    without Triton.
    """
    layers = (at for at in packable_layers(model, on_device=True) if at[0] not in kept)
    return _replace(model, layers, lambda dtype: fmt, place)


_FormatOf = Callable[[torch.dtype], WeightFormat | None]


def _pack_here(model: PreTrainedModel, format_of: _FormatOf, threads: CpuThreads) -> int:
    num_bytes = _replace(model, packable_layers(model), format_of, on_cpu(threads))
    give_fp32_logits(model)
    return num_bytes


def _replace(
    model: nn.Module, layers: Iterable["LinearAt"], format_of: _FormatOf, place: Place
) -> int:
    """Replace layers by packed layers, and return the packed bytes.

    `format_of` gives the format for a layer's dtype; None leaves the layer as it is.
    """
    num_bytes = 0
    for path, parent, name, linear in list(layers):
        fmt, dtype = format_of(linear.weight.dtype), linear.weight.dtype
        if fmt is None:
            continue
        bias = None if linear.bias is None else linear.bias.detach().cpu()
        label = f"{type(parent).__name__}.{name}"
        weight = linear.weight.detach().cpu()
        importance = importance_of(model, path, weight)
        packed = pack_dense(weight, bias, fmt, importance=importance, name=label)
        setattr(parent, name, cut_like(linear, place(packed, dtype, None)))
        num_bytes += packed.num_bytes
    untie(model, PackedLinear, DeviceLinear)
    return num_bytes


def untie(model: nn.Module, *kinds: type[nn.Module]) -> None:
    """Stop Transformers from tying weights that layers of these `kinds` hold in packed form.

    A head that was tied to the embeddings stays a packed copy of them.
    """
    tied = tied_weights(model)
    kept = [key for key in tied if isinstance(model.get_submodule(key.rpartition(".")[0]), kinds)]
    for key in kept:
        del tied[key]
    if kept:  # otherwise `tie_weights` would find them in the config again
        config = cast("ModelPart", model).config
        config.tie_word_embeddings = False
        config.get_text_config().tie_word_embeddings = False


def give_fp32_logits(model: PreTrainedModel) -> None:
    """Make a packed head on the CPU return fp32 logits.

    Rounding logits to bf16 is the largest loss of bf16 steps.
    """
    head = model.get_output_embeddings()
    if isinstance(head, PackedLinear):
        head.gives_fp32 = True


def packed_layers(model: nn.Module) -> Iterator[tuple[str, PackedLinear]]:
    """Yield (path, layer) of the packed linear layers."""
    return ((path, m) for path, m in model.named_modules() if isinstance(m, PackedLinear))


def share_threads(model: nn.Module, threads: CpuThreads) -> None:
    """Make all packed layers of a model use these threads from now on."""
    for module in model.modules():
        own = module.on_host if isinstance(module, HostEmbedding) else module
        if isinstance(own, PackedModule):
            own.threads = threads


def has_quantised_experts(store: Iterable[HostLayer]) -> bool:
    """Whether any MoE layer of a store is packed in eight bits or fewer."""
    return any(isinstance(x, PackedLayer) and _has_few_bits(x.layout.format) for x in store)


def _has_few_bits(fmt: WeightFormat) -> bool:
    return fmt.bits <= 8


def is_tower(path: str) -> bool:
    """Whether the module at a path belongs to a tower for images or sound."""
    return any(word in path for word in ("vision", "visual", "audio"))


LinearAt = tuple[str, nn.Module, str, nn.Linear]
"""(path, parent module, name in the parent, linear layer)"""


def packable_layers(model: nn.Module, *, on_device: bool = False) -> Iterator[LinearAt]:
    """Yield the linear layers that may be packed for the CPU or, if `on_device`, for a GPU.

    Layers of routers, experts and towers, and small layers, are left out; for a GPU also grouped
    layers, and layers that latent attention reads by head.
    """
    least = _LEAST_ROWS * cast("ModelPart", model).config.get_text_config().hidden_size
    routers = router_layers(model)
    for above, parent in model.named_modules():
        if is_experts_module(parent) or is_tower(above):
            continue
        for name, child in parent.named_children():
            is_known = type(child) is nn.Linear or (is_grouped(child) and not on_device)
            is_kept = child in routers or (on_device and name in _READ_BY_HEAD)
            if is_known and not is_kept and child.weight.numel() >= least:
                yield f"{above}.{name}".removeprefix("."), parent, name, child


def tied_weights(model: nn.Module) -> dict[str, str]:
    """Return {name of a tied weight: name of the weight to which Transformers ties it}."""
    return getattr(model, "all_tied_weights_keys", {})


def has_kernels() -> bool:
    """Whether Triton is installed; its kernels multiply by packed weights on a GPU."""
    return importlib.util.find_spec("triton") is not None


def place_on(device: torch.device, threads: CpuThreads) -> Place:
    """Return a function that builds packed layers on `device`; `threads` are for the CPU."""
    return on_cpu(threads) if device.type == "cpu" else on_device(device)


def on_cpu(threads: CpuThreads) -> Place:
    """Return a function that builds packed layers, which `threads` compute on the CPU."""
    return lambda weight, dtype, order: PackedLinear(weight, threads, dtype, order)


def on_device(device: torch.device) -> Place:
    """Return a function that builds packed layers on a GPU.

    The function raises `ConfigError` without Triton.
    """

    def place(weight: DenseWeight, dtype: torch.dtype, order: Tensor | None) -> nn.Module:
        if not has_kernels():
            raise ConfigError(
                "linear layers are packed and Triton, which would multiply with such weights on "
                "the GPU, is not installed; pip install triton, or leave dense_dtype out"
            )
        from tandem.triton_kernels.dense import copy_to_device

        there = None if order is None else order.to(device)
        return DeviceLinear(copy_to_device(weight, device), dtype, there)

    return place
