"""Blocks of 32 or 256 numbers in GGUF files: which packed format holds which, and their codes."""

import dataclasses
from collections.abc import Callable, Collection
from enum import IntEnum

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tandem.checkpoint.sources.block_bits import fp16_at, halves, shifts
from tandem.checkpoint.sources.codes import Codes
from tandem.checkpoint.sources.gguf_tables import TABLES
from tandem.kernels.formats import WeightFormat, find_format

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
    _, size, read = _BLOCKS[kind.name]
    blocks = torch.from_numpy(data.view(np.uint8)).view(rows, -1, size)
    return read(blocks)


def _q4_0(blocks: Tensor) -> Codes:
    codes = halves(blocks[..., 2:]).flatten(1).to(torch.int8) - 8
    return Codes("int", codes, fp16_at(blocks, 0))


def _q4_1(blocks: Tensor) -> Codes:
    codes = halves(blocks[..., 4:]).flatten(1)
    return Codes("int", codes, fp16_at(blocks, 0), minima=fp16_at(blocks, 2))


def _fifth_bits(blocks: Tensor) -> Tensor:
    """Return 16 or 0 for each number of blocks whose (4,) bytes have a bit for each."""
    bits = blocks.contiguous().view(torch.int32)
    fifth = (bits >> torch.arange(_BLOCK, dtype=torch.int32, device="cpu")) & 1
    return 16 * fifth.to(torch.int8)


def _q5_0(blocks: Tensor) -> Codes:
    codes = halves(blocks[..., 6:]).to(torch.int8) + _fifth_bits(blocks[..., 2:6]) - 16
    return Codes("int", codes.flatten(1), fp16_at(blocks, 0))


def _q5_1(blocks: Tensor) -> Codes:
    codes = halves(blocks[..., 8:]).to(torch.int8) + _fifth_bits(blocks[..., 4:8])
    return Codes("int", codes.flatten(1), fp16_at(blocks, 0), minima=fp16_at(blocks, 2))


def _q8_0(blocks: Tensor) -> Codes:
    return Codes(
        "int", blocks[..., 2:].contiguous().view(torch.int8).flatten(1), fp16_at(blocks, 0)
    )


def _mxfp4(blocks: Tensor) -> Codes:
    return Codes("mxfp4", halves(blocks[..., 1:]).flatten(1), blocks[..., 0].contiguous())


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
        super_scales=fp16_at(blocks, 0), super_minima=-fp16_at(blocks, 2),
    )  # fmt: skip


def _q4_k(blocks: Tensor) -> Codes:
    return _affine_super("q4_k", blocks, halves(blocks[..., 16:].unflatten(-1, (4, 32))))


def _q5_k(blocks: Tensor) -> Codes:
    low = halves(blocks[..., 48:].unflatten(-1, (4, 32))).unflatten(-1, (2, 32)).flatten(-3, -2)
    fifth = (blocks[..., None, 16:48] >> shifts(8, 1)) & 1  # bit g is of group g
    return _affine_super("q5_k", blocks, low | (fifth << 4))


def _q6_k(blocks: Tensor) -> Codes:
    low = halves(blocks[..., :128].unflatten(-1, (2, 64)))  # (rows, blocks, 2, 128)
    upper = blocks[..., 128:192].unflatten(-1, (2, 1, 32)) >> shifts(4, 2)
    codes = low | ((upper & 3) << 4).flatten(-2)
    scales = blocks[..., 192:208].contiguous().view(torch.int8).flatten(1)
    return Codes("q6_k", codes.flatten(1), scales, super_scales=fp16_at(blocks, 208))


def _q2_k(blocks: Tensor) -> Codes:
    codes = (blocks[..., 16:80].unflatten(-1, (2, 1, 32)) >> shifts(4, 2)) & 3
    scales, minima = (part.flatten(1).to(torch.int8) for part in _two_nibbles(blocks[..., :16]))
    return Codes(
        "q2_k", codes.flatten(1), scales, minima=minima,
        super_scales=fp16_at(blocks, 80), super_minima=-fp16_at(blocks, 82),
    )  # fmt: skip


def _q3_k(blocks: Tensor) -> Codes:
    low = (blocks[..., 32:96].unflatten(-1, (2, 1, 32)) >> shifts(4, 2)) & 3
    third = (blocks[..., None, :32] >> shifts(8, 1)) & 1
    codes = low.flatten(2) | (third.flatten(2) << 2)
    upper = (blocks[..., None, 104:108] >> shifts(4, 2)) & 3
    lower = torch.cat(_two_nibbles(blocks[..., 96:104]), dim=-1)
    scales = (lower | upper.flatten(2) << 4).to(torch.int16) - 32
    own = scales.flatten(1).to(torch.int8)
    return Codes("q3_k", codes.flatten(1), own, super_scales=fp16_at(blocks, 108))


def _two_nibbles(blocks: Tensor) -> tuple[Tensor, Tensor]:
    return blocks & 0x0F, blocks >> 4


# By GGUF type: the packed format that holds it, bytes of a block, what reads (rows, blocks, bytes).
_BLOCKS: dict[str, tuple[str, int, Callable[[Tensor], Codes]]] = {
    "Q4_0": ("int4-g32", 18, _q4_0), "Q4_1": ("int4z-g32", 20, _q4_1),
    "Q5_0": ("int5-g32", 22, _q5_0), "Q5_1": ("int5z-g32", 24, _q5_1),
    "Q8_0": ("int8-g32", 34, _q8_0), "MXFP4": ("mxfp4", 17, _mxfp4),
    "Q2_K": ("q2_k", 84, _q2_k), "Q3_K": ("q3_k", 110, _q3_k), "Q4_K": ("q4_k", 144, _q4_k),
    "Q5_K": ("q5_k", 176, _q5_k), "Q6_K": ("q6_k", 210, _q6_k), **TABLES,
}  # fmt: skip
FORMATS = {kind: name for kind, (name, _, _) in _BLOCKS.items()}
# Other formats that hold a format's codes exactly, the smallest first: for a matrix whose parts
# are of different types.
_WIDER = {
    "int4-g32": ("int5-g32", "int8-g32"), "int5-g32": ("int8-g32",), "iq4_nl": ("int8-g32",),
    "int4z-g32": ("int5z-g32",), "q4_k": ("q5_k",), "q3_k": ("q6_k",),
}  # fmt: skip


def common_format(kinds: Collection[str]) -> WeightFormat | None:
    """Return the smallest packed format that holds blocks of all these types, if one does."""
    held = [(name, *_WIDER.get(name, ())) for name in map(FORMATS.get, kinds) if name is not None]
    common = [name for name in held[0] if all(name in others for others in held)] if held else []
    return find_format(common[0]) if common and len(held) == len(kinds) else None


def widened(codes: Codes, own: WeightFormat, wider: WeightFormat) -> Codes:
    """Return codes of one format as another stores them, that holds them too."""
    if own == wider or codes.kind == "int":
        return codes  # which any format of whole numbers stores
    if own.encoding.table:
        values = torch.tensor(own.encoding.table, dtype=torch.int8, device="cpu")
        return dataclasses.replace(codes, kind="int", codes=values[codes.codes.long()])
    more = wider.encoding.offset - own.encoding.offset
    return dataclasses.replace(codes, kind=wider.name, codes=codes.codes + more)
