"""Where the bits of llama.cpp's IQ types are: grid indices, signs and scales, per 256 columns.

These types code 4 or 8 neighbouring weights at once, as an index into a grid: a fixed table of
`csrc/grids.cpp`, whose entries are called lines. The 32-bit words of the file's blocks are kept
unchanged.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class BitField:
    """The places of equally wide numbers in the words of 256 columns; each is within one word."""

    base: int
    fours: int
    """Bits from a group of four numbers to the next group."""
    step: int
    """Bits between neighbours of a group; 0: the group shares one number."""
    width: int

    def at(self, number: int) -> int:
        """Return the index of a number's first bit in the words of 256 columns."""
        return self.base + number // 4 * self.fours + number % 4 * self.step


@dataclass(frozen=True, slots=True)
class Grid:
    """The layout of the words of 256 columns; the same as `Grid` in `csrc/grids.hpp`."""

    words: int
    """32-bit words per 256 columns."""
    line_cols: int
    """Columns of a line of the grid; each takes 16 / line_cols bits of the line."""
    low: BitField
    """The low eight bits of each line's index."""
    high: BitField | None
    """The higher bits of each line's index; None if eight bits suffice."""
    signs: BitField
    """Sign bits of eight columns: one bit that shifts all eight (IQ1), seven bits with the eighth
    from even parity, or eight bits."""
    scales: BitField
    """The scale of each group is twice this number plus one."""
    factor: BitField | None = None
    """IQ1_M's fp16 factor in four parts, the lowest first; other formats store it separately."""

    @property
    def line_bits(self) -> int:
        """Bits of one number of a line."""
        return 16 // self.line_cols

    @property
    def sign_bit(self) -> int:
        """The sign bit of a stored code, above the bits of the number."""
        return 2 if self.line_cols == 8 else 3


_BYTES = BitField(0, 32, 8, 8)  # one byte per line: its number
GRIDS = {
    "iq1_s": Grid(12, 8, _BYTES, BitField(256, 16, 3, 3), BitField(271, 16, 0, 1),
                  BitField(268, 64, 16, 3)),
    "iq1_m": Grid(14, 8, _BYTES, BitField(256, 16, 4, 3), BitField(259, 16, 4, 1),
                  BitField(384, 16, 3, 3), BitField(396, 64, 16, 4)),
    "iq2_xxs": Grid(16, 8, BitField(0, 64, 8, 8), None, BitField(32, 64, 7, 7),
                    BitField(60, 256, 64, 4)),
    "iq2_xs": Grid(18, 8, BitField(0, 64, 16, 8), BitField(8, 64, 16, 1), BitField(9, 64, 16, 7),
                   BitField(512, 16, 4, 4)),
    "iq2_s": Grid(20, 8, _BYTES, BitField(512, 8, 2, 2), BitField(256, 32, 8, 8),
                  BitField(576, 16, 4, 4)),
    "iq3_xxs": Grid(24, 4, _BYTES, None, BitField(512, 32, 7, 7), BitField(540, 128, 32, 4)),
    "iq3_s": Grid(27, 4, _BYTES, BitField(512, 4, 1, 1), BitField(576, 32, 8, 8),
                  BitField(832, 16, 4, 4)),
}  # fmt: skip
