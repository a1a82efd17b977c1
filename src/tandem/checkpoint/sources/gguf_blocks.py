"""Blocks of 32 or 256 numbers in GGUF files: which packed format holds which, and their codes."""

from collections.abc import Callable
from enum import IntEnum

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tandem.checkpoint.sources.codes import Codes

_BLOCK = 32


def read_blocks(data: npt.NDArray[np.generic], kind: IntEnum, *, keep: bool) -> Codes:
    """Return the codes of (rows, bytes) blocks; their values, with scales of one, if not `keep`.

    `kind` is the gguf package's; where codes are kept it is one of `FORMATS`.
    """
    if not keep:
        from gguf import dequantize

        values = torch.from_numpy(np.ascontiguousarray(dequantize(data, kind)))
        return Codes("int", values, torch.ones(values.shape[0], 1, device="cpu"))
    rows = data.shape[0]
    size, read = _BLOCKS[kind.name]
    blocks = torch.from_numpy(data.view(np.uint8)).view(rows, -1, size)
    return read(blocks)


def _halves(blocks: Tensor) -> Tensor:
    """Return the numbers of (..., 16) bytes: 16 low nibbles, then the 16 high ones."""
    return torch.cat((blocks & 0x0F, blocks >> 4), dim=-1)


def _fp16(blocks: Tensor, first: int) -> Tensor:
    part: Tensor = blocks[..., first : first + 2].contiguous().view(torch.float16)
    return part[..., 0]


def _q4_0(blocks: Tensor) -> Codes:
    codes = _halves(blocks[..., 2:]).flatten(1).to(torch.int8) - 8
    return Codes("int", codes, _fp16(blocks, 0))


def _q4_1(blocks: Tensor) -> Codes:
    codes = _halves(blocks[..., 4:]).flatten(1)
    return Codes("int", codes, _fp16(blocks, 0), minima=_fp16(blocks, 2))


def _q5_0(blocks: Tensor) -> Codes:
    bits = blocks[..., 2:6].contiguous().view(torch.int32)  # one fifth bit for each number
    fifth = (bits >> torch.arange(_BLOCK, dtype=torch.int32, device="cpu")) & 1
    codes = _halves(blocks[..., 6:]).to(torch.int32) + 16 * fifth - 16
    return Codes("int", codes.flatten(1).to(torch.int8), _fp16(blocks, 0))


def _q8_0(blocks: Tensor) -> Codes:
    return Codes("int", blocks[..., 2:].contiguous().view(torch.int8).flatten(1), _fp16(blocks, 0))


def _mxfp4(blocks: Tensor) -> Codes:
    return Codes("mxfp4", _halves(blocks[..., 1:]).flatten(1), blocks[..., 0].contiguous())


def _scales_and_minima(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Return the 6-bit scales and minima of eight groups in 12 bytes: (rows, groups) int8."""
    low, middle, high = blocks.unflatten(-1, (3, 4)).unbind(-2)
    scales = torch.cat((low & 0x3F, (high & 0x0F) | ((low >> 2) & 0x30)), dim=-1)
    minima = torch.cat((middle & 0x3F, (high >> 4) | ((middle >> 2) & 0x30)), dim=-1)
    return scales.flatten(1).to(torch.int8), minima.flatten(1).to(torch.int8)


def _affine_super(kind: str, blocks: Tensor, codes: Tensor) -> Codes:
    """Return codes whose blocks begin with two fp16 factors and 12 bytes of scales and minima."""
    scales, minima = _scales_and_minima(blocks[..., 4:16])
    return Codes(
        kind, codes.flatten(1), scales, minima=minima,
        super_scales=_fp16(blocks, 0), super_minima=-_fp16(blocks, 2),
    )  # fmt: skip


def _q4_k(blocks: Tensor) -> Codes:
    return _affine_super("q4_k", blocks, _halves(blocks[..., 16:].unflatten(-1, (4, 32))))


def _q5_k(blocks: Tensor) -> Codes:
    low = _halves(blocks[..., 48:].unflatten(-1, (4, 32))).unflatten(-1, (2, 32)).flatten(-3, -2)
    fifth = (blocks[..., None, 16:48] >> _shifts(8, 1)) & 1  # bit g is of group g
    return _affine_super("q5_k", blocks, low | (fifth << 4))


def _q6_k(blocks: Tensor) -> Codes:
    low = _halves(blocks[..., :128].unflatten(-1, (2, 64)))  # (rows, blocks, 2, 128)
    upper = blocks[..., 128:192].unflatten(-1, (2, 1, 32)) >> _shifts(4, 2)
    codes = low | ((upper & 3) << 4).flatten(-2)
    scales = blocks[..., 192:208].contiguous().view(torch.int8).flatten(1)
    return Codes("q6_k", codes.flatten(1), scales, super_scales=_fp16(blocks, 208))


def _shifts(count: int, bits: int) -> Tensor:
    """Return 0, bits, 2 * bits, ... as a column."""
    return torch.arange(0, count * bits, bits, dtype=torch.uint8, device="cpu")[:, None]


FORMATS = {
    "Q4_0": "int4-g32", "Q4_1": "int4z-g32", "Q5_0": "int8-g32", "Q8_0": "int8-g32",
    "MXFP4": "mxfp4", "Q4_K": "q4_k", "Q5_K": "q5_k", "Q6_K": "q6_k",
}  # fmt: skip
# Bytes of a block, and what reads (rows, blocks, bytes).
_BLOCKS: dict[str, tuple[int, Callable[[Tensor], Codes]]] = {
    "Q4_0": (18, _q4_0), "Q4_1": (20, _q4_1), "Q5_0": (22, _q5_0), "Q8_0": (34, _q8_0),
    "MXFP4": (17, _mxfp4), "Q4_K": (144, _q4_k), "Q5_K": (176, _q5_k), "Q6_K": (210, _q6_k),
}  # fmt: skip
