"""Builds a model of a released shape with random weights, directly in packed form.

Packed weights never exist in bf16: the model is built on the meta device, experts and linear layers
get packed buffers, and only the rest is allocated. Random codes cost the kernels as much time as
real codes.
"""

from collections.abc import Callable
from functools import cache, partial
from typing import cast

import torch
from torch import Tensor, nn
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
)

from tandem.bench.model_shapes import ModelShape
from tandem.bench.random_weights import random_experts, random_matrix
from tandem.core.errors import ConfigError, UnsupportedModelError
from tandem.experts.store.packed_layer import STORED_NAME, PackedLayer
from tandem.foreign_types import ModelPart, PreTrainedModel
from tandem.hf.adapters import put_on_interface, text_class
from tandem.hf.compat import model_of, parts_in_fp32
from tandem.hf.config import OffloadConfig, parse_dense_dtype
from tandem.hf.dense import give_fp32_logits, is_tower, packable_layers, untie
from tandem.hf.experts import is_experts_module
from tandem.hf.packed_layers import PackedLinear
from tandem.hf.quantizer import OffloadQuantizer
from tandem.hf.token_tables import TABLE, is_by_token
from tandem.kernels.dense import CpuThreads, DenseWeight
from tandem.kernels.formats.expert import ExpertLayout
from tandem.kernels.formats.packed import PackedMatrix
from tandem.kernels.formats.weight_format import ROWS_PER_BLOCK, WeightFormat
from tandem.kernels.grouped import cut_like

_DrawExperts = Callable[[ExpertLayout, int], Tensor]
_DrawMatrix = Callable[[int, int, WeightFormat], PackedMatrix]


def build_random_model(
    shape: ModelShape,
    offload: OffloadConfig,
    *,
    dense_dtype: str = "auto",
    num_layers: int | None = None,
    vocabulary: int | None = None,
    device: str = "cpu",
    has_huge_pages: bool = True,
    is_shared: bool = False,
) -> PreTrainedModel:
    """Build a model of a shape, of `num_layers` layers and `vocabulary` tokens if these are given.

    Without `has_huge_pages`, experts are in small pages, as in a mapped file. Dense weights are on
    `device`; on a GPU, `offload` determines how they are packed, and `dense_dtype` must be "none".
    With `is_shared`, packed weights of equal size share memory across layers, so that a model of
    any size can be saved.
    """
    if num_layers is not None:
        shape = shape.sample(num_layers)
    model = empty_model_of(shape, vocabulary)
    quantizer = OffloadQuantizer(offload)
    draw_experts: _DrawExperts = partial(random_experts, has_huge_pages=has_huge_pages)
    draw_matrix: _DrawMatrix = random_matrix
    if is_shared:
        draw_experts, draw_matrix = cache(draw_experts), cache(draw_matrix)
    if not shape.whole_values:
        _drop_towers(model)
    put_on_interface(model)
    # First, so that the next step counts these layers as packed ones.
    fmt = parse_dense_dtype(dense_dtype)
    _pack_linear_layers(model, fmt, quantizer.runtime.threads, draw_matrix)
    quantizer._process_model_before_weight_loading(model)
    for layer in quantizer.runtime.store:
        if not isinstance(layer, PackedLayer):
            raise ConfigError(
                f"expert_dtype is {offload.expert_dtype!r}; random experts are packed, so choose "
                "int4, int8, mxfp4 or another packed format"
            )
        layer.adopt(STORED_NAME, draw_experts(layer.layout, layer.arrivals.num_experts))
    drop_experts(model)
    _widen(model)
    model.to_empty(device=device)
    quantizer.runtime.device = torch.device(device)
    model.init_weights()  # also the tables of rotary embeddings, which no checkpoint holds
    _draw_routes(model)
    quantizer._process_model_after_weight_loading(model)
    model.generation_config.eos_token_id = None
    return model.eval().requires_grad_(False)


def empty_model_of(shape: ModelShape, vocabulary: int | None = None) -> PreTrainedModel:
    """Build a bf16 model of a shape on the meta device, with `vocabulary` tokens if given.

    Raises `UnsupportedModelError` for a text model that Transformers builds only as a part of
    another model, if the shape's `whole` does not name that model.
    """
    values = dict(shape.values)
    if vocabulary is not None:
        values["vocab_size"] = vocabulary
        if "unpadded_vocab_size" in vars(CONFIG_MAPPING[shape.model_type]()):
            values["unpadded_vocab_size"] = vocabulary  # the size of Inkling's logits
    if shape.whole:
        text = values | {"model_type": shape.model_type}
        whole = AutoConfig.for_model(shape.whole, text_config=text, **shape.whole_values)
        with torch.device("meta"):
            multimodal: PreTrainedModel = AutoModelForImageTextToText.from_config(
                whole, dtype=torch.bfloat16
            )
        whole.architectures = [type(multimodal).__name__]
        return multimodal
    config = AutoConfig.for_model(shape.model_type, **values)
    own = text_class(shape.model_type)
    if own is None and type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise UnsupportedModelError(
            f"Transformers cannot build a text model of {shape.model_type}, so its speed cannot be "
            "measured; tandem plan --no-measure leaves speeds out"
        )
    with torch.device("meta"):
        if own is not None:
            return model_of(own, config, torch.bfloat16)
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    return model


def _widen(model: PreTrainedModel) -> None:
    """Convert to fp32 the parameters that loading a checkpoint keeps in fp32."""
    words = parts_in_fp32(model)
    for name, parameter in model.named_parameters():
        if any(word in name for word in words):
            parameter.data = parameter.data.float()


def _draw_routes(model: nn.Module) -> None:
    """Fill the tables of layers that are routed by token id with random experts.

    A released model has these tables in its checkpoint.
    """
    random = torch.Generator().manual_seed(0)
    for module in model.modules():
        if is_by_token(module):
            table = module.get_buffer(TABLE)
            chances = torch.rand(
                len(table), cast("ModelPart", module).num_experts, generator=random, device="cpu"
            )
            table.copy_(chances.topk(table.shape[1]).indices)


def _drop_towers(model: nn.Module) -> None:
    """Remove a model's towers for images and sound, which text tokens do not use."""
    for path, parent in list(model.named_modules()):
        for name in [name for name, _ in parent.named_children()]:
            if is_tower(f"{path}.{name}".removeprefix(".")):
                setattr(parent, name, nn.Identity())


def drop_experts(model: nn.Module) -> None:
    """Replace the weights of all experts modules by empty tensors."""
    for module in model.modules():
        if is_experts_module(module):
            for name, parameter in list(module.named_parameters(recurse=False)):
                empty = torch.empty(0, dtype=parameter.dtype, device="meta")
                setattr(module, name, nn.Parameter(empty, requires_grad=False))


def _pack_linear_layers(
    model: PreTrainedModel, fmt: WeightFormat | None, threads: CpuThreads, draw: _DrawMatrix
) -> None:
    if fmt is None:
        return
    for _, parent, name, linear in list(packable_layers(model)):
        rows, cols = linear.weight.shape
        bias = (
            None
            if linear.bias is None
            else torch.zeros(-(-rows // ROWS_PER_BLOCK) * ROWS_PER_BLOCK, device="cpu")
        )
        weight = DenseWeight(draw(rows, cols, fmt), bias)
        setattr(parent, name, cut_like(linear, PackedLinear(weight, threads, torch.bfloat16)))
    untie(model, PackedLinear)
    give_fp32_logits(model)
