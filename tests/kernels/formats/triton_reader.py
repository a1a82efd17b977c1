"""A small Triton reader of the packed layout: tiles of 16 rows x 32 columns, times a vector.

It shows that a GPU can read what the CPU kernels read. A tile of int4 is 256 contiguous bytes, of
bf16 1024: each thread loads 16 bytes (the same dword of 4 neighbouring rows), takes its codes apart
in registers, and only the finished tile is turned.
"""

from typing import TYPE_CHECKING

import pytest

triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")

if TYPE_CHECKING:
    from typing import Any as tensor  # noqa: N813  Triton's own name

    constexpr = int
else:
    from triton.language import constexpr, tensor


@triton.jit
def add(a: tensor, b: tensor) -> tensor:
    """Sum two: tl.sum was decorated when Triton was imported, maybe not for the interpreter."""
    return a + b


@triton.jit
def int4_tile(
    data: tensor, scales: tensor, block: tensor, group: tensor, cols: constexpr
) -> tensor:
    """Return rows 16 * block.. and columns 32 * group.. of an int4-g32 matrix: (16, 32) fp32.

    `data` points to int32, `scales` to float16, `cols` is padded.
    """
    start = (block * (cols // 8) + group * 4) * 16
    words = tl.load(data + start + tl.arange(0, 64))  # 4 chunks of 8 columns x 16 rows
    words = tl.reshape(words, (4, 1, 16))
    place = tl.arange(0, 8)  # of a column in its chunk: byte place % 4, high nibble from 4 on
    shifts = tl.reshape(8 * (place % 4) + 4 * (place // 4), (1, 8, 1))
    codes = tl.reshape((words >> shifts) & 15, (32, 16))  # (columns, rows)
    line = tl.load(scales + (block * (cols // 32) + group) * 16 + tl.arange(0, 16))
    return tl.trans((codes - 8).to(tl.float32) * line.to(tl.float32)[None, :])


@triton.jit
def bf16_tile(data: tensor, block: tensor, group: tensor, cols: constexpr) -> tensor:
    """Return rows 16 * block.. and columns 32 * group.. of a bf16 matrix: (16, 32) fp32."""
    start = (block * (cols // 2) + group * 16) * 16
    words = tl.load(data + start + tl.arange(0, 256))  # 16 chunks of 2 columns x 16 rows
    words = tl.reshape(words, (16, 1, 16))
    low_first = tl.reshape(16 - 16 * tl.arange(0, 2), (1, 2, 1))
    bits = tl.reshape((words << low_first) & -65536, (32, 16))  # a bf16 is the upper half of fp32
    return tl.trans(bits.to(tl.float32, bitcast=True))


@triton.jit
def packed_matvec(
    data: tensor,
    scales: tensor,
    x: tensor,
    out: tensor,
    tiles: tensor,
    cols: constexpr,
    is_int4: constexpr,
) -> None:
    """Multiply one block of 16 rows with `x` (cols,); also store its tiles as (rows, cols)."""
    block = tl.program_id(0)
    rows = block * 16 + tl.arange(0, 16)
    total = tl.full((16,), 0, dtype=tl.float32)
    for group in range(cols // 32):
        if is_int4:
            tile = int4_tile(data, scales, block, group, cols)
        else:
            tile = bf16_tile(data, block, group, cols)
        places = group * 32 + tl.arange(0, 32)
        tl.store(tiles + rows[:, None] * cols + places[None, :], tile)
        total += tl.reduce(tile * tl.load(x + places)[None, :], 1, add)
    tl.store(out + rows, total)
