"""Rounds weights to a format natively: what `quantize` defines in torch, and places them too."""

import torch
from torch import Tensor

from tandem.kernels import _native, engine
from tandem.kernels.formats.blocks import MatrixBlocks
from tandem.kernels.formats.weight_format import WeightFormat

# The numbers are those of csrc/quantize.hpp.
_ROUNDED = ("bf16", "fp16", "int8", "fp8", "int4", "int4z", "mxfp4")  # kinds of formats
_SOURCE_TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}


def quantize_natively(
    blocks: MatrixBlocks,
    fmt: WeightFormat,
    weight: Tensor,
    importance: Tensor | None,
    *,
    has_search: bool,
) -> bool:
    """Round (rows, cols) weights, of any stride, into blocks that have room for just them.

    `importance` is (padded cols,) fp32. Works with as many threads as torch does. Codes and scales
    are `quantize`'s but for the order of its sums, and the same for every instruction set. Returns
    False, with some blocks written perhaps, if a weight is not finite or too large for the format,
    or if its dtype or the format has no native rounding.
    """
    source_type = _SOURCE_TYPES.get(weight.dtype)
    if source_type is None or fmt.kind not in _ROUNDED:
        return False
    rows, cols = weight.shape
    assert blocks.words.shape[0] * blocks.words.shape[2] == fmt.padded_rows(rows)
    scales = blocks.scales
    return _native.quantize(
        engine.best_isa(),
        torch.get_num_threads(),
        fmt.encoding.number,
        fmt.group_size or 0,
        has_search,
        rows,
        cols,
        fmt.padded_cols(cols),
        source_type,
        weight.data_ptr(),
        weight.stride(0),
        weight.stride(1),
        0 if importance is None else importance.data_ptr(),
        blocks.words.data_ptr(),
        blocks.words.stride(0) * blocks.words.element_size(),
        0 if scales is None else scales.data_ptr(),
        0 if scales is None else scales.stride(0) * scales.element_size(),
    )
