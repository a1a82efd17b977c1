"""Blocks in GGUF files whose codes are looked up: IQ4, NVFP4, and the grids of IQ2 and IQ3."""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from tandem.checkpoint.sources.block_bits import fp16_at, halves, nibbles, shifts
from tandem.checkpoint.sources.codes import Codes
from tandem.kernels.formats import find_format
from tandem.kernels.formats.codes import nearest_codes, of_groups

_NAN = 0x7F  # of e4m3, which llama.cpp reads as zero


def iq4_nl(blocks: Tensor) -> Codes:
    """Read blocks of 32 with an fp16 scale."""
    return Codes("iq4_nl", halves(blocks[..., 2:]).flatten(1), fp16_at(blocks, 0))


def iq4_xs(blocks: Tensor) -> Codes:
    """Read super-blocks of 256 with scales of six bits."""
    upper = blocks[..., 2:4, None] >> shifts(4, 2)[:, 0]  # four groups in a byte
    scales = nibbles(blocks[..., 4:8]) | ((upper.flatten(-2) & 3) << 4)
    codes = halves(blocks[..., 8:].unflatten(-1, (8, 16)))
    own = (scales.flatten(1).to(torch.int16) - 32).to(torch.int8)
    return Codes("iq4_xs", codes.flatten(1), own, super_scales=fp16_at(blocks, 0))


def nvfp4(blocks: Tensor) -> Codes:
    """Read blocks of 64 with four e4m3 scales; a factor of the whole matrix is a tensor apart."""
    scales = blocks[..., :4].flatten(1) & _NAN
    scales = torch.where(scales == _NAN, 0, scales)
    codes = halves(blocks[..., 4:].unflatten(-1, (4, 8)))
    factors = torch.ones(len(blocks), 1, device="cpu")
    return Codes("nvfp4", codes.flatten(1), scales, super_scales=factors)


def iq3_xxs(blocks: Tensor) -> Codes:
    """Read super-blocks whose scales are above the signs of 32 numbers."""
    return _of_grid("IQ3_XXS", "iq3_xxs", blocks, blocks[..., 69::4] >> 4)


def iq3_s(blocks: Tensor) -> Codes:
    """Read super-blocks that end with scales of 32 numbers."""
    return _of_grid("IQ3_S", "iq3_s", blocks, nibbles(blocks[..., 106:]))


def iq2_xxs(blocks: Tensor) -> Codes:
    """Read super-blocks whose scales are above the signs of 32 numbers."""
    return _of_grid("IQ2_XXS", "iq2_xxs", blocks, blocks[..., 9::8] >> 4)


def iq2_xs(blocks: Tensor) -> Codes:
    """Read super-blocks that end with scales of 16 numbers."""
    return _of_grid("IQ2_XS", "iq2_xs", blocks, nibbles(blocks[..., 66:]))


def iq2_s(blocks: Tensor) -> Codes:
    """Read super-blocks that end with scales of 16 numbers."""
    return _of_grid("IQ2_S", "iq2_xs", blocks, nibbles(blocks[..., 74:]))


def _of_grid(kind: str, name: str, blocks: Tensor, steps: Tensor) -> Codes:
    """Return the table's codes of numbers that stand in a grid of the gguf package.

    The scale of a group is 2 * step + 1; what it leaves of each value is one of the table's.
    """
    from gguf import GGMLQuantizationType, dequantize

    values = dequantize(np.ascontiguousarray(blocks.flatten(1).numpy()), GGMLQuantizationType[kind])
    fmt, factors = find_format(name), fp16_at(blocks, 0)
    scales = (2 * steps.flatten(1) + 1).to(torch.int8)
    inverse = of_groups(scales, factors).reciprocal().nan_to_num(0, 0, 0)
    by_group = torch.from_numpy(values).unflatten(1, (-1, fmt.group_size))
    codes = nearest_codes(by_group * inverse[..., None], fmt).flatten(1)
    return Codes(name, codes, scales, super_scales=factors)


# By GGUF type: the packed format that holds it, bytes of a block, what reads (rows, blocks, bytes).
TABLES: dict[str, tuple[str, int, Callable[[Tensor], Codes]]] = {
    "IQ4_NL": ("iq4_nl", 18, iq4_nl), "IQ4_XS": ("iq4_xs", 136, iq4_xs),
    "NVFP4": ("nvfp4", 36, nvfp4), "IQ3_XXS": ("iq3_xxs", 98, iq3_xxs),
    "IQ3_S": ("iq3_s", 110, iq3_s), "IQ2_XXS": ("iq2_xxs", 66, iq2_xxs),
    "IQ2_XS": ("iq2_xs", 74, iq2_xs), "IQ2_S": ("iq2_xs", 82, iq2_s),
}  # fmt: skip
