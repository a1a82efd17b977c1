"""Fields of bits in blocks of bytes, (rows, blocks, bytes) uint8."""

import torch
from torch import Tensor


def halves(blocks: Tensor) -> Tensor:
    """Return the numbers of (..., n) bytes: n low nibbles, then the n high ones."""
    return torch.cat((blocks & 0x0F, blocks >> 4), dim=-1)


def nibbles(blocks: Tensor) -> Tensor:
    """Return the numbers of (..., n) bytes, each byte's low nibble and then its high one."""
    return torch.stack((blocks & 0x0F, blocks >> 4), dim=-1).flatten(-2)


def fp16_at(blocks: Tensor, first: int) -> Tensor:
    """Return the fp16 number of each block that begins at a byte: (rows, blocks)."""
    part: Tensor = blocks[..., first : first + 2].contiguous().view(torch.float16)
    return part[..., 0]


def shifts(count: int, bits: int) -> Tensor:
    """Return 0, bits, 2 * bits, ... as a column."""
    return torch.arange(0, count * bits, bits, dtype=torch.uint8, device="cpu")[:, None]
