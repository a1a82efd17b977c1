"""Rounds weights natively into packed matrices; `quantize` is the definition in torch."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from tandem.kernels import _native, engine
from tandem.kernels.formats.blocks import MatrixBlocks
from tandem.kernels.formats.weight_format import WeightFormat

_ROUNDED = (  # the kinds of formats that native code rounds to
    "bf16", "fp16", "int8", "fp8", "int4", "int4z", "mxfp4", "int5", "int5z", "iq4_nl", "iq4_xs",
    "q2_k", "q3_k", "q4_k", "q5_k", "q6_k", "iq2_xxs", "iq2_xs", "iq2_s", "iq3_xxs", "iq3_s",
)  # fmt: skip
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class Rounding(NamedTuple):
    """A job: round weights (rows, cols), of any stride, into the blocks that they fill."""

    blocks: MatrixBlocks
    format: WeightFormat
    weight: Tensor
    name: str = "weight"
    importance: Tensor | None = None
    """Weights of the columns' squared errors: (padded cols,) fp32."""


def quantize_natively(roundings: Sequence[Rounding], *, has_search: bool = True) -> bool:
    """Round matrices natively; return whether this was possible.

    Uses as many threads as torch; mapped files are read ahead. Codes and scales differ from those
    of `quantize` only by the order of sums, and are the same with every instruction set. Returns
    False, possibly after writing some blocks, if a weight is not finite or too large for its
    format, or if a dtype or a format has no native rounding.
    """
    if any(r.weight.dtype not in _DTYPES or r.format.kind not in _ROUNDED for r in roundings):
        return False
    calls = [_call(rounding) for rounding in roundings]
    return _native.quantize(engine.best_isa(), torch.get_num_threads(), has_search, calls)


def _call(rounding: Rounding) -> "_native.Rounding":
    blocks, fmt, weight, _, importance = rounding
    return (
        fmt.encoding.number, fmt.group_size or 0, fmt.padded_cols(weight.shape[1]),
        weight, importance, blocks.words, blocks.scales,
    )  # fmt: skip
