"""Rounds weights to formats natively: what `quantize` defines in torch, and places them too."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from tandem.kernels import _native, engine
from tandem.kernels.formats.blocks import MatrixBlocks
from tandem.kernels.formats.weight_format import WeightFormat

# The numbers are those of csrc/quantize.hpp.
_ROUNDED = ("bf16", "fp16", "int8", "fp8", "int4", "int4z", "mxfp4")  # kinds of formats
_SOURCE_TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}


class Rounding(NamedTuple):
    """(rows, cols) weights, of any stride, and blocks that have room for just them."""

    blocks: MatrixBlocks
    format: WeightFormat
    weight: Tensor
    name: str = "weight"
    importance: Tensor | None = None
    """What the squared errors of the columns count: (padded cols,) fp32."""


def quantize_natively(roundings: Sequence[Rounding], *, has_search: bool = True) -> bool:
    """Round matrices with as many threads as torch has; mapped files are read ahead of them.

    Codes and scales are `quantize`'s but for the order of its sums, and the same for every
    instruction set. Returns False, with some blocks written perhaps, if a weight is not finite or
    too large for its format, or if a dtype or a format has no native rounding.
    """
    if any(r.weight.dtype not in _SOURCE_TYPES or r.format.kind not in _ROUNDED for r in roundings):
        return False
    calls = torch.tensor([_call(r) for r in roundings], dtype=torch.int64, device="cpu")
    isa, num_threads = engine.best_isa(), torch.get_num_threads()
    return _native.quantize(isa, num_threads, has_search, len(calls), calls.data_ptr())


def _call(rounding: Rounding) -> tuple[int, ...]:
    """Return what csrc/bindings_dense.cpp reads of a matrix."""
    blocks, fmt, weight, _, importance = rounding
    (rows, cols), words, scales = weight.shape, blocks.words, blocks.scales
    assert words.shape[0] * words.shape[2] == fmt.padded_rows(rows)
    return (
        fmt.encoding.number, fmt.group_size or 0, rows, cols, fmt.padded_cols(cols),
        _SOURCE_TYPES[weight.dtype], weight.data_ptr(), *weight.stride(),
        0 if importance is None else importance.data_ptr(),
        words.data_ptr(), words.stride(0) * words.element_size(),
        *((0, 0) if scales is None else
          (scales.data_ptr(), scales.stride(0) * scales.element_size())),
    )  # fmt: skip
