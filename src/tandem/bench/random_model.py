"""A model of a released shape with random weights, straight in packed form.

Nothing is ever whole in bf16: the model is built without memory; experts and linear layers get
packed buffers, and only what is left is allocated. Random codes cost the kernels what real ones do.
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from tandem.bench.model_shapes import ModelShape
from tandem.core.errors import ConfigError
from tandem.experts.store.packed_layer import STORED_NAME, PackedLayer
from tandem.hf.config import OffloadConfig, parse_dense_dtype
from tandem.hf.dense import PackedLinear, packable_layers, untie
from tandem.hf.experts import is_experts_module
from tandem.hf.quantizer import OffloadQuantizer
from tandem.kernels.dense import CpuThreads, DenseWeight
from tandem.kernels.formats.expert import ExpertLayout
from tandem.kernels.formats.packed import PackedMatrix
from tandem.kernels.formats.weight_format import WeightFormat
from tandem.kernels.memory import allocate_buffers

# Experts that are drawn; the others of a layer are copies, at addresses of their own.
_DRAWN_EXPERTS = 2
_STD = 0.02


def build_random_model(
    shape: ModelShape,
    offload: OffloadConfig,
    threads: CpuThreads,
    *,
    dense_dtype: str = "auto",
    num_layers: int | None = None,
    vocabulary: int | None = None,
    device: str = "cpu",
    has_huge_pages: bool = True,
) -> Any:
    """Build a shape as if it had been loaded; `num_layers` and `vocabulary` make it smaller.

    Without huge pages experts lie as those of a mapped file do. Dense parts are on `device`; on a
    GPU they are bf16, so `dense_dtype` is "none" there.
    """
    if num_layers is not None:
        shape = shape.sample(num_layers)
    cut = {} if vocabulary is None else {"vocab_size": vocabulary}
    config = AutoConfig.for_model(shape.model_type, **shape.values | cut)
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    quantizer = OffloadQuantizer(offload)
    quantizer._process_model_before_weight_loading(model)
    for layer in quantizer.runtime.store:
        if not isinstance(layer, PackedLayer):
            raise ConfigError(
                f"expert_dtype is {offload.expert_dtype!r}; random experts are packed, so choose "
                "int4, int8, mxfp4 or another packed format"
            )
        experts = random_experts(
            layer.layout, layer.arrivals.num_experts, has_huge_pages=has_huge_pages
        )
        layer.adopt(STORED_NAME, experts)
    drop_experts(model)
    _pack_linear_layers(model, parse_dense_dtype(dense_dtype), threads)
    model.to_empty(device=device)
    model.init_weights()  # also the tables of rotary embeddings, which no checkpoint holds
    quantizer._process_model_after_weight_loading(model)
    model.generation_config.eos_token_id = None
    return model.eval().requires_grad_(False)


def drop_experts(model: nn.Module) -> None:
    """Leave experts modules without weights of their own."""
    for module in model.modules():
        if is_experts_module(module):
            for name, parameter in list(module.named_parameters(recurse=False)):
                empty = torch.empty(0, dtype=parameter.dtype, device="meta")
                setattr(module, name, nn.Parameter(empty, requires_grad=False))


def _pack_linear_layers(model: Any, fmt: WeightFormat | None, threads: CpuThreads) -> None:
    if fmt is None:
        return
    for parent, name, linear in list(packable_layers(model)):
        rows, cols = linear.weight.shape
        weight = DenseWeight(_random_matrix(rows, cols, fmt), None)
        setattr(parent, name, PackedLinear(weight, threads, torch.bfloat16))
    untie(model, PackedLinear)


def _random_matrix(rows: int, cols: int, fmt: WeightFormat) -> PackedMatrix:
    matrix = PackedMatrix.empty(rows, cols, fmt)
    _draw_codes(matrix.data, fmt)
    if matrix.scales is not None:
        _fill_scales(matrix.scales.view(torch.uint8), fmt)
    return matrix


def random_experts(
    layout: ExpertLayout, num_experts: int, *, has_huge_pages: bool = True
) -> Tensor:
    """Return packed experts (num_experts, bytes): random codes with scales of usual size."""
    store = allocate_buffers(num_experts, layout.num_bytes, has_huge_pages=has_huge_pages)
    for drawn in store[:_DRAWN_EXPERTS]:
        _draw_codes(drawn, layout.format)
        for section in (layout.up_scales, layout.down_scales):
            _fill_scales(section.of(drawn), layout.format)
        for section in (layout.up_bias, layout.down_bias):
            section.of(drawn).zero_()
    for expert in range(_DRAWN_EXPERTS, num_experts):
        store[expert] = store[expert % _DRAWN_EXPERTS]
    return store


def _draw_codes(buffer: Tensor, fmt: WeightFormat) -> None:
    if fmt.kind in ("bf16", "fp16"):
        buffer.view(torch.bfloat16 if fmt.kind == "bf16" else torch.float16).normal_(std=_STD)
    elif fmt.kind == "fp8":
        buffer.random_(0, 0x7E)  # without e4m3's NaN
    else:
        buffer.view(torch.int64).random_()  # 63 bits; eight times as fast as byte by byte


def _fill_scales(scales: Tensor, fmt: WeightFormat) -> None:
    if fmt.kind == "mxfp4":
        scales.fill_(120)  # 2^-7
    elif fmt.kind == "fp8":
        scales.view(torch.float32).fill_(_STD / 100)
    elif scales.numel():
        scales.view(torch.float16).fill_(_STD / 2 ** (fmt.bits - 1))
