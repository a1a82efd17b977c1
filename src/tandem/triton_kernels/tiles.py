"""Tiles of a packed matrix in registers: dwords, scales, and the numbers that codes stand for.

`docs/formats.md` says where each byte lies. Every format is one transposition of dwords: lane n of
a tile is row n % 16 of block n // 16, and a chunk is the dword that holds 2, 4 or 8 columns of it.
Codes become floats by bit tricks, without conversions, as `value = factor * biased + offset`; the
launcher passes both numbers, which depend on the format alone.
"""

import triton
import triton.language as tl
from triton.language import constexpr, tensor

# What `biased_values` returns stands for factor * biased + offset.
FACTOR_AND_OFFSET = {
    "bf16": (1.0, 0.0),
    "fp16": (1.0, 0.0),
    "int8": (256.0, -256.0 - 128.0),
    "fp8": (256.0, 0.0),
    "int4": (16.0, -16.0 - 8.0),
    "int4z": (16.0, -16.0),
    "mxfp4": (16384.0, 0.0),
}


@triton.jit
def load_words(
    data: tensor,
    block: tensor,
    lane: tensor,
    chunk: tensor,
    num_blocks: constexpr,
    num_chunks: constexpr,
) -> tensor:
    """Return dwords (chunks, lanes) int32; zeros outside the matrix."""
    place = (block * (num_chunks * 16) + lane)[None, :] + chunk[:, None] * 16
    is_inside = (block < num_blocks)[None, :] & (chunk < num_chunks)[:, None]
    return tl.load(data + place, mask=is_inside, other=0)


@triton.jit
def load_scales(
    scales: tensor,
    block: tensor,
    lane: tensor,
    chunk: tensor,
    num_blocks: constexpr,
    num_chunks: constexpr,
    kind: constexpr,
    chunks_per_group: constexpr,
) -> tensor:
    """Return the scale of each dword, (chunks, lanes) fp32; zeros outside the matrix.

    Padding chunks of the last group share the last real chunk's.
    """
    num_groups: constexpr = num_chunks // chunks_per_group
    group = (chunk // chunks_per_group)[:, None]
    is_inside = (block < num_blocks)[None, :] & (chunk < num_chunks)[:, None]
    line = block[None, :] * num_groups + group
    if kind == "fp8":
        place = line + lane[None, :] * 0  # one scale for the 16 rows of a block
    elif kind == "int4z":
        place = line * 32 + lane[None, :]
    else:
        place = line * 16 + lane[None, :]
    raw = tl.load(scales + place, mask=is_inside, other=0)
    if kind == "mxfp4":
        exponent = raw.to(tl.int32)
        # 2^-127 is subnormal: its exponent field is 0 and its mantissa is not.
        bits = tl.where(exponent == 0, 1 << 22, exponent << 23)
        scale = bits.to(tl.float32, bitcast=True)
    else:
        scale = raw.to(tl.float32)
    return scale


@triton.jit
def load_minima(
    scales: tensor,
    block: tensor,
    lane: tensor,
    chunk: tensor,
    num_blocks: constexpr,
    num_chunks: constexpr,
    chunks_per_group: constexpr,
) -> tensor:
    """Return int4z's minimum of each dword, (chunks, lanes) fp32: 16 elements after its scale."""
    num_groups: constexpr = num_chunks // chunks_per_group
    line = block[None, :] * num_groups + (chunk // chunks_per_group)[:, None]
    is_inside = (block < num_blocks)[None, :] & (chunk < num_chunks)[:, None]
    return tl.load(scales + line * 32 + 16 + lane[None, :], mask=is_inside, other=0).to(tl.float32)


@triton.jit
def biased_values(words: tensor, place: tensor, kind: constexpr) -> tensor:
    """Return column `place` of each dword as fp32 that are still to be scaled and shifted.

    `place` is a number, or a tensor that broadcasts with `words`.
    """
    if kind == "bf16":
        values = ((words << (16 - 16 * place)) & -65536).to(tl.float32, bitcast=True)
    elif kind == "fp16":
        values = _half((words >> (16 * place)) & 0xFFFF)
    elif kind == "int8":  # the code becomes the upper mantissa of a number from 1 to 2
        values = _from_one(((words >> (8 * place)) & 0xFF) << 15)
    elif kind == "fp8":  # e4m3 in the bits of a half, whose exponent counts from another number
        code = words >> (8 * place)
        values = _half(((code & 0x80) << 8) | ((code & 0x7F) << 7))
    else:
        code = words >> (8 * (place % 4) + 4 * (place // 4))
        if kind == "mxfp4":
            values = _half(((code & 8) << 12) | ((code & 7) << 9))
        else:
            values = _from_one((code & 15) << 19)
    return values


@triton.jit
def _from_one(mantissa: tensor) -> tensor:
    return (mantissa | 0x3F800000).to(tl.float32, bitcast=True)


@triton.jit
def _half(bits: tensor) -> tensor:
    return bits.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def section(address: tensor, offset: constexpr, dtype: constexpr) -> tensor:
    """Return a pointer to a section of the expert at `address`.

    Sections start at multiples of 64 bytes; said of the pointer (not of the number), that lets
    loads be 16 bytes wide.
    """
    return tl.multiple_of((address + offset).to(tl.pointer_type(dtype)), 64)


@triton.jit
def scale_section(address: tensor, offset: constexpr, kind: constexpr) -> tensor:
    """Return a pointer to the scales, in the format's type of scale."""
    if kind == "mxfp4":
        pointer = section(address, offset, tl.uint8)
    elif kind == "fp8":
        pointer = section(address, offset, tl.float32)
    else:
        pointer = section(address, offset, tl.float16)
    return pointer
