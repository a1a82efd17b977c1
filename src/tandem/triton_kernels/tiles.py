"""Tiles of a packed matrix in registers: dwords, scales, and the numbers that codes stand for.

`docs/formats.md` says where each byte lies. All formats transpose dwords in the same way: row n of
a tile is row n % 16 of block n // 16, and a chunk is the dword with the lowest bits of 2, 4, 8 or
16 columns of that row. Codes become floats by bit tricks, without conversions, or are looked up.
"""

import triton
import triton.language as tl
from triton.language import constexpr, tensor


@triton.jit
def load_words(
    data: tensor,
    block: tensor,
    offset: tensor,
    chunk: tensor,
    num_blocks: tensor,
    num_chunks: tensor,
    table: tensor,
    packed: constexpr,
) -> tensor:
    """Return two dwords of each chunk's codes, (chunks, outputs) int32; zeros outside the matrix.

    The first has the codes' low bits. The second has the higher bits, shifted so that the chunk's
    own bits are the lowest of each byte.
    """
    is_inside = (block < num_blocks)[None, :] & (chunk < num_chunks)[:, None]
    dwords = num_chunks * packed.bits // packed.low_bits
    of_row = (block * (dwords * 16) + offset)[None, :]
    if packed.grid is not None:
        grid: constexpr = packed.grid
        low = _lines(data, block, offset, chunk, is_inside, num_chunks, table, grid)
        high = low
    elif packed.high_bits == 0:
        low = tl.load(data + of_row + chunk[:, None] * 16, mask=is_inside, other=0)
        high = low
    else:  # strips of 32 columns store one plane after the other
        strip = chunk // packed.low_bits * packed.bits
        place = chunk % packed.low_bits
        at = of_row + (strip + place)[:, None] * 16
        low = tl.load(data + at, mask=is_inside, other=0)
        fours = place * (8 // packed.low_bits)
        above = strip + packed.low_bits + fours // (8 // packed.high_bits)
        high = tl.load(data + of_row + above[:, None] * 16, mask=is_inside, other=0)
        high = high >> (packed.high_bits * (fours % (8 // packed.high_bits)))[:, None]
    return low, high


@triton.jit
def _words_of_supers(
    data: tensor,
    block: tensor,
    offset: tensor,
    chunk: tensor,
    num_chunks: tensor,
    grid: constexpr,
) -> tensor:
    """Return pointers to the first word of each chunk's super-block, (chunks, outputs)."""
    super_block = block[None, :] * (num_chunks // 32) + (chunk // 32)[:, None]
    return data + super_block * (grid.words * 16) + offset[None, :]


@triton.jit
def _field(words: tensor, number: tensor, is_inside: tensor, field: constexpr) -> tensor:
    """Return the value of item `number` of a bit field in the words of each super-block."""
    bit = field.base + number // 4 * field.fours + number % 4 * field.step
    word = tl.load(words + bit // 32 * 16, mask=is_inside, other=0)
    return (word >> (bit % 32)) & ((1 << field.width) - 1)


@triton.jit
def _line(
    words: tensor, number: tensor, is_inside: tensor, table: tensor, grid: constexpr
) -> tensor:
    """Return the codes of line `number`, read from `table` at the index in the words."""
    low: constexpr = grid.low
    place = _field(words, number, is_inside, low)
    if grid.high is not None:
        high: constexpr = grid.high
        place |= _field(words, number, is_inside, high) << 8
    return tl.load((table + 16).to(tl.pointer_type(tl.int32)) + place, mask=is_inside, other=0)


@triton.jit
def _spread(bits: tensor) -> tensor:
    """Return a dword whose four bytes have one of the four `bits` each, as their lowest bit."""
    return (bits * 0x00204081) & 0x01010101


@triton.jit
def _lines(
    data: tensor,
    block: tensor,
    offset: tensor,
    chunk: tensor,
    is_inside: tensor,
    num_chunks: tensor,
    table: tensor,
    grid: constexpr,
) -> tensor:
    """Return dwords with the codes of eight columns, made from lines of the grid and signs."""
    words = _words_of_supers(data, block, offset, chunk, num_chunks, grid)
    number = (chunk % 32)[:, None]
    if grid.line_cols == 8:
        codes = _line(words, number, is_inside, table, grid)
    else:
        codes = _line(words, 2 * number, is_inside, table, grid)
        codes |= _line(words, 2 * number + 1, is_inside, table, grid) << 4
    sign_field: constexpr = grid.signs
    signs = _field(words, number, is_inside, sign_field)
    if grid.signs.width == 1:
        signs = signs * 255
    elif grid.signs.width == 7:  # the eighth sign makes the number of minus signs even
        odd = signs ^ (signs >> 4)
        odd = odd ^ (odd >> 2)
        signs |= ((odd ^ (odd >> 1)) & 1) << 7
    codes |= _spread(signs & 15) << grid.sign_bit
    return codes | (_spread(signs >> 4) << (4 + grid.sign_bit))


@triton.jit
def _scales_of_lines(
    data: tensor,
    scales: tensor,
    block: tensor,
    offset: tensor,
    chunk: tensor,
    is_inside: tensor,
    num_chunks: tensor,
    packed: constexpr,
) -> tensor:
    """Return the scales in super-blocks' words times the super-blocks' factors, fp32."""
    grid: constexpr = packed.grid
    words = _words_of_supers(data, block, offset, chunk, num_chunks, grid)
    group = (chunk % 32 // packed.chunks_per_group)[:, None]
    steps_field: constexpr = grid.scales
    steps = _field(words, group, is_inside, steps_field)
    if grid.factor is not None:
        parts: constexpr = grid.factor
        bits = _field(words, 0, is_inside, parts)
        for part in tl.static_range(1, 4):
            bits |= _field(words, part, is_inside, parts) << (4 * part)
        factor = _half(bits)
    else:
        super_block = block[None, :] * (num_chunks // 32) + (chunk // 32)[:, None]
        halves = scales.to(tl.pointer_type(tl.float16)) + super_block * 16 + offset[None, :]
        factor = tl.load(halves, mask=is_inside, other=0).to(tl.float32)
    return (2 * steps + 1).to(tl.float32) * factor


@triton.jit
def load_scales(
    data: tensor,
    scales: tensor,
    block: tensor,
    offset: tensor,
    chunk: tensor,
    num_blocks: tensor,
    num_chunks: tensor,
    packed: constexpr,
) -> tensor:
    """Return the scale and the minimum of each chunk, (chunks, outputs) fp32; zeros outside.

    Padding chunks of the last group have the scale of the last real chunk. Without minima, the
    second result is the scale again.
    """
    group = (chunk // packed.chunks_per_group)[:, None]
    is_inside = (block < num_blocks)[None, :] & (chunk < num_chunks)[:, None]
    num_groups = num_chunks // packed.chunks_per_group
    if packed.grid is not None:
        scale = _scales_of_lines(data, scales, block, offset, chunk, is_inside, num_chunks, packed)
        minimum = scale
    elif packed.factor_bytes > 0:
        scale, minimum = _scales_of_supers(
            scales, block, offset, group, is_inside, num_groups, packed
        )
    else:
        line = block[None, :] * num_groups + group
        if packed.scale == "fp32":
            place = line + offset[None, :] * 0  # one scale for all 16 rows of a block
        else:
            place = line * packed.group_stride + offset[None, :]
        raw = tl.load(scales + place, mask=is_inside, other=0)
        if packed.scale == "e8m0":
            exponent = raw.to(tl.int32)
            # 2^-127 is subnormal: its exponent field is 0 and its mantissa is not.
            bits = tl.where(exponent == 0, 1 << 22, exponent << 23)
            scale = bits.to(tl.float32, bitcast=True)
        else:
            scale = raw.to(tl.float32)
        minimum = scale
        if packed.has_minima:
            minimum = tl.load(scales + place + 16, mask=is_inside, other=0).to(tl.float32)
    return scale, minimum


@triton.jit
def _scales_of_supers(
    scales: tensor,
    block: tensor,
    offset: tensor,
    group: tensor,
    is_inside: tensor,
    num_groups: tensor,
    packed: constexpr,
) -> tensor:
    """Return scales and minima stored as bytes, times the factors of their super-block or row."""
    per_super = packed.groups_per_super if packed.groups_per_super > 0 else num_groups
    line = block[None, :] * (num_groups // per_super) + group // per_super
    factors_bytes: constexpr = packed.factor_bytes * (32 if packed.has_minima else 16)
    super_bytes = factors_bytes + per_super * packed.group_stride
    at = line * super_bytes + factors_bytes + offset[None, :]
    at += group % per_super * packed.group_stride
    own = tl.load(scales + at, mask=is_inside, other=0)
    if packed.factor_bytes == 4:
        factors = scales.to(tl.pointer_type(tl.float32))
    else:
        factors = scales.to(tl.pointer_type(tl.float16))
    factors += line * (super_bytes // packed.factor_bytes) + offset[None, :]
    scale = tl.load(factors, mask=is_inside, other=0).to(tl.float32) * _number(own, packed)
    minimum = scale
    if packed.has_minima:
        if packed.scale == "nibble":
            low = (own >> 4).to(tl.float32)
        else:
            low = _number(tl.load(scales + at + 16, mask=is_inside, other=0), packed)
        minimum = tl.load(factors + 16, mask=is_inside, other=0).to(tl.float32) * low
    return scale, minimum


@triton.jit
def _number(byte: tensor, packed: constexpr) -> tensor:
    """Return the scale that a group's byte (uint8) stands for, fp32."""
    if packed.scale == "nibble":
        number = (byte & 15).to(tl.float32)
    elif packed.scale == "e4m3":
        number = _e4m3(byte.to(tl.int32)) * 256.0
    else:
        number = byte.to(tl.int8, bitcast=True).to(tl.float32)
    return number


@triton.jit
def biased_values(
    low: tensor, high: tensor, place: tensor, table: tensor, packed: constexpr
) -> tensor:
    """Return column `place` of each chunk, fp32, before `Packed.factor` and `Packed.offset`.

    `place` is a number, or a tensor that broadcasts with the dwords.
    """
    if packed.element == "bf16":
        values = ((low << (16 - 16 * place)) & -65536).to(tl.float32, bitcast=True)
    elif packed.element == "fp16":
        values = _half((low >> (16 * place)) & 0xFFFF)
    else:
        byte = 8 * (place % 4)
        code = (low >> (byte + packed.low_bits * (place // 4))) & ((1 << packed.low_bits) - 1)
        if packed.high_bits > 0:
            above = high >> (byte + packed.high_bits * (place // 4))
            code |= (above & ((1 << packed.high_bits) - 1)) << packed.low_bits
        if packed.element == "e4m3":
            values = _e4m3(code)
        elif packed.element == "e2m1":
            values = _half(((code & 8) << 12) | ((code & 7) << 9))
        elif packed.element == "table":
            values = tl.load(table + code).to(tl.float32)
        else:  # the code becomes the upper bits of the mantissa of a number from 1 to 2
            mantissa = code << (23 - packed.bits)
            values = (mantissa | 0x3F800000).to(tl.float32, bitcast=True)
    return values


@triton.jit
def _half(bits: tensor) -> tensor:
    return bits.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def _e4m3(code: tensor) -> tensor:
    """Return e4m3 numbers divided by 256: their bits as fp16, whose exponent bias is 8 larger."""
    return _half(((code & 0x80) << 8) | ((code & 0x7F) << 7))


@triton.jit
def section(address: tensor, offset: tensor, dtype: constexpr) -> tensor:
    """Return a pointer to a section of the expert or layer at `address`.

    Sections start at multiples of 64 bytes; this hint on the pointer (not on the number) allows
    reads of 16 bytes.
    """
    return tl.multiple_of((address + offset).to(tl.pointer_type(dtype)), 64)


@triton.jit
def scale_section(address: tensor, offset: tensor, packed: constexpr) -> tensor:
    """Return a pointer to the scales, in their dtype; scales of super-blocks are bytes."""
    if packed.factor_bytes > 0 or packed.scale == "e8m0":
        pointer = section(address, offset, tl.uint8)
    elif packed.scale == "fp32":
        pointer = section(address, offset, tl.float32)
    else:
        pointer = section(address, offset, tl.float16)
    return pointer
