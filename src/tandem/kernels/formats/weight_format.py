"""The weight formats by name: what each format stores, and in how many bytes. Uses no tensors."""

from dataclasses import dataclass
from typing import Literal

from tandem.core.errors import ConfigError
from tandem.core.registry import nearest_names
from tandem.kernels.formats.grids import GRIDS, Grid

ROWS_PER_BLOCK = 16  # one 512-bit register holds one dword of each row
SECTION_ALIGNMENT_BYTES = 64  # one cache line
# The alignment of reads that bypass the page cache (O_DIRECT): sectors and pages are at most this
# large.
FILE_ALIGNMENT_BYTES = 4096
_STRIP_COLS = 32  # the planes of bits of a strip are adjacent

Element = Literal["integer", "table", "e2m1", "e4m3", "bf16", "fp16"]
Scale = Literal["fp16", "fp32", "e8m0", "e4m3", "int8", "nibble", "grid"]
_SCALE_BYTES: dict[Scale, float] = {
    "fp16": 2, "fp32": 4, "e8m0": 1, "e4m3": 1, "int8": 1, "nibble": 0.5, "grid": 0,
}  # fmt: skip
WHOLE_ROW = -1  # number of columns of a super-block: the whole row


def aligned(num_bytes: int, alignment_bytes: int = SECTION_ALIGNMENT_BYTES) -> int:
    """Return the smallest multiple of `alignment_bytes` that is at least `num_bytes`."""
    return -(-num_bytes // alignment_bytes) * alignment_bytes


@dataclass(frozen=True, slots=True)
class Encoding:
    """How a kind of format stores weights and scales; all other code reads this record."""

    number: int
    """The format's number in `csrc/packed.hpp`."""
    bits: int
    element: Element
    scale: Scale | None = None
    rows_per_scale: int = 1
    has_minima: bool = False
    """Whether a minimum of the same type follows each scale; it is added to scaled codes."""
    codes: tuple[int, int] = (0, 0)
    """Lowest and highest code in checkpoints."""
    offset: int = 0
    """Stored code = code + offset, so this is the stored code of zero."""
    super_cols: int = 0
    """Columns of a super-block, whose scales (and minima) share a factor; `WHOLE_ROW`: one factor
    per row; 0: no factors."""
    table: tuple[float, ...] = ()
    """Values of the stored codes of table formats, in the format's own units (powers of two)."""
    grid: Grid | None = None
    """The layout of words that hold codes and scales, if codes are lines of a grid; else None."""

    @property
    def scale_bytes(self) -> float:
        """Bytes of scales and minima per group of one row."""
        if self.scale is None:
            return 0.0
        return _SCALE_BYTES[self.scale] * self.lines / self.rows_per_scale

    @property
    def lines(self) -> int:
        """Numbers stored per group besides codes: 1 for a scale, 2 for a scale and a minimum."""
        return 2 if self.has_minima else 1

    @property
    def factor(self) -> Literal["fp16", "fp32"]:
        """The type of super-blocks' factors."""
        return "fp32" if self.super_cols == WHOLE_ROW else "fp16"

    @property
    def super_bytes(self) -> int:
        """Bytes of the factors of one super-block of a row."""
        if not self.super_cols or (self.grid is not None and self.grid.factor is not None):
            return 0
        return int(_SCALE_BYTES[self.factor]) * self.lines

    @property
    def has_zero(self) -> bool:
        """Whether every group can represent zero, so that padding columns can be zero."""
        return not self.has_minima and (not self.table or self.table[self.offset] == 0)

    @property
    def planes(self) -> tuple[int, ...]:
        """Widths of the planes into which a code's bits are split, the lowest bits first."""
        widths = (16, 8, 4, 2, 1)
        return tuple(width for width in widths if self.bits & width)


def _super_blocks(
    number: int,
    bits: int,
    *,
    codes: tuple[int, int],
    scale: Scale = "int8",
    has_minima: bool = False,
) -> Encoding:
    """Return the encoding of a K-quant of llama.cpp."""
    return Encoding(
        number, bits, "integer", scale, has_minima=has_minima, codes=codes, offset=-codes[0],
        super_cols=256,
    )  # fmt: skip


def _table(number: int, values: tuple[float, ...], *, scale: Scale = "int8") -> Encoding:
    """Return the encoding of codes that index a table of values: llama.cpp's IQ4 types."""
    bits, supers = (len(values) - 1).bit_length(), 256 if scale == "int8" else 0
    codes = (0, len(values) - 1)
    return Encoding(number, bits, "table", scale, codes=codes, super_cols=supers, table=values)


# llama.cpp's kvalues_iq4nl, and the magnitudes of its grids. A group's scale is an odd multiple of
# the grids' unit: 1/4 of its factor for IQ3_XXS, 1/8 for IQ2. IQ1's numbers are shifted up by an
# eighth, or down if their sign bit is set.
_IQ4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
_IQ3_XXS = tuple(value / 4 for value in (4, 12, 20, 28, 36, 44, 52, 62))
_IQ3_S = (1.0, 3.0, 5.0, 7.0, 9.0, 11.0, 13.0, 15.0)
_IQ2 = (1.0, 3.125, 5.375, 0.0)
_IQ1 = (-0.875, 0.125, 1.125, 0.0, -1.125, -0.125, 0.875, 0.0)


def _with_signs(magnitudes: tuple[float, ...]) -> tuple[float, ...]:
    """Return a table whose codes have their sign in the highest bit."""
    return (*magnitudes, *(-value for value in magnitudes))


def _of_grid(number: int, name: str, values: tuple[float, ...]) -> Encoding:
    """Return the encoding of a grid's codes; `values` are its magnitudes, or IQ1's values."""
    table = values if name.startswith("iq1") else _with_signs(values)
    bits = (len(table) - 1).bit_length()
    return Encoding(
        number, bits, "table", "grid", codes=(0, len(table) - 1), super_cols=256, table=table,
        grid=GRIDS[name],
    )  # fmt: skip


_ENCODINGS = {
    "bf16": Encoding(0, 16, "bf16"),
    "fp16": Encoding(5, 16, "fp16"),
    "int8": Encoding(1, 8, "integer", "fp16", codes=(-128, 127), offset=128),
    "fp8": Encoding(6, 8, "e4m3", "fp32", rows_per_scale=ROWS_PER_BLOCK),
    "int4": Encoding(2, 4, "integer", "fp16", codes=(-8, 7), offset=8),
    "int4z": Encoding(3, 4, "integer", "fp16", codes=(0, 15), has_minima=True),
    "mxfp4": Encoding(4, 4, "e2m1", "e8m0", codes=(0, 15)),
    "q4_k": _super_blocks(7, 4, codes=(0, 15), has_minima=True),
    "q5_k": _super_blocks(8, 5, codes=(0, 31), has_minima=True),
    "q6_k": _super_blocks(9, 6, codes=(-32, 31)),
    "int5z": Encoding(10, 5, "integer", "fp16", codes=(0, 31), has_minima=True),
    "iq4_nl": _table(11, _IQ4, scale="fp16"),
    "iq4_xs": _table(12, _IQ4),
    "nvfp4": Encoding(13, 4, "e2m1", "e4m3", codes=(0, 15), super_cols=WHOLE_ROW),
    "q2_k": _super_blocks(14, 2, codes=(0, 3), scale="nibble", has_minima=True),
    "q3_k": _super_blocks(15, 3, codes=(-4, 3)),
    "iq3_xxs": _of_grid(16, "iq3_xxs", _IQ3_XXS),
    "iq3_s": _of_grid(17, "iq3_s", _IQ3_S),
    "iq2_xxs": _of_grid(18, "iq2_xxs", _IQ2),
    "iq2_xs": _of_grid(19, "iq2_xs", _IQ2),
    "int5": Encoding(20, 5, "integer", "fp16", codes=(-16, 15), offset=16),
    "iq2_s": _of_grid(21, "iq2_s", _IQ2),
    "iq1_s": _of_grid(22, "iq1_s", _IQ1),
    "iq1_m": _of_grid(23, "iq1_m", _IQ1),
}


@dataclass(frozen=True, slots=True)
class WeightFormat:
    """One way to store weights; `docs/formats.md` says where each byte lies."""

    name: str
    kind: str
    group_size: int | None = None
    """Columns that share a scale; None: no scales."""

    @property
    def encoding(self) -> Encoding:
        """How this kind of format stores weights and scales."""
        return _ENCODINGS[self.kind]

    @property
    def bits(self) -> int:
        """Bits of a weight's code, without scales; for a grid, of a decoded number."""
        return self.encoding.bits

    @property
    def col_multiple(self) -> int:
        """Columns are padded with zeros to a multiple of this number."""
        if self.encoding.super_cols > 0:
            return self.encoding.super_cols
        return max(_STRIP_COLS, self.group_size) if self.group_size else 8

    def dwords(self, cols: int) -> int:
        """Return the number of dwords of a row's codes, padding included."""
        if self.encoding.grid is not None:
            return self.supers(cols) * self.encoding.grid.words
        return self.padded_cols(cols) * self.bits // 32

    @property
    def bits_per_weight(self) -> float:
        """Bits per weight including its share of the scales, without padding and row factors."""
        if self.group_size is None:
            return float(self.bits)
        encoding = self.encoding
        share = encoding.scale_bytes / self.group_size
        if encoding.super_cols > 0:
            share += encoding.super_bytes / encoding.super_cols
        if encoding.grid is not None:
            return 32 * encoding.grid.words / encoding.super_cols + 8 * share
        return self.bits + 8 * share

    def supers(self, cols: int) -> int:
        """Return how many super-blocks a row of `cols` columns has; 0 if the format has none."""
        if self.encoding.super_cols == WHOLE_ROW:
            return 1
        return self.padded_cols(cols) // self.encoding.super_cols if self.encoding.super_cols else 0

    def padded_rows(self, rows: int) -> int:
        """Round up to whole blocks of 16 rows."""
        return -(-rows // ROWS_PER_BLOCK) * ROWS_PER_BLOCK

    def padded_cols(self, cols: int) -> int:
        """Round up to a multiple of `col_multiple`."""
        return -(-cols // self.col_multiple) * self.col_multiple

    def data_bytes(self, rows: int, cols: int) -> int:
        """Return the bytes of a (rows, cols) matrix's codes, padding included."""
        return self.padded_rows(rows) * self.dwords(cols) * 4

    def scale_bytes(self, rows: int, cols: int) -> int:
        """Return the bytes of a (rows, cols) matrix's scales (and minima), padding included."""
        if self.group_size is None:
            return 0
        width, encoding = self.padded_cols(cols), self.encoding
        one_row = width // self.group_size * encoding.scale_bytes
        one_row += self.supers(cols) * encoding.super_bytes
        return int(self.padded_rows(rows) * one_row)

    def matrix_bytes(self, rows: int, cols: int) -> int:
        """Return the bytes of a (rows, cols) matrix with its scales, padding included."""
        return self.data_bytes(rows, cols) + self.scale_bytes(rows, cols)


@dataclass(frozen=True, slots=True)
class MixedFormat:
    """Different formats for the first and the second projection of experts."""

    up: WeightFormat
    down: WeightFormat

    @property
    def name(self) -> str:
        """Both names joined by "+", as in `expert_dtype`."""
        return f"{self.up.name}{_AND}{self.down.name}"


ExpertFormat = WeightFormat | MixedFormat
_AND = "+"


def formats_of(fmt: ExpertFormat) -> tuple[WeightFormat, WeightFormat]:
    """Return the formats of the first and the second projection."""
    return (fmt.up, fmt.down) if isinstance(fmt, MixedFormat) else (fmt, fmt)


def expert_format(up: WeightFormat, down: WeightFormat) -> ExpertFormat:
    """Return `up` if both projections have this format, otherwise a `MixedFormat`."""
    return up if up == down else MixedFormat(up, down)


def _grouped(kind: str) -> tuple[WeightFormat, ...]:
    return tuple(WeightFormat(f"{kind}-g{size}", kind, size) for size in (32, 64, 128))


FORMATS: tuple[WeightFormat, ...] = (
    WeightFormat("bf16", "bf16"),
    WeightFormat("fp16", "fp16"),
    *_grouped("int8"),
    WeightFormat("fp8", "fp8", 128),
    *_grouped("int4"),
    *_grouped("int4z"),
    WeightFormat("mxfp4", "mxfp4", 32),
    WeightFormat("q4_k", "q4_k", 32),
    WeightFormat("q5_k", "q5_k", 32),
    WeightFormat("q6_k", "q6_k", 16),
    WeightFormat("int5-g32", "int5", 32),
    WeightFormat("int5z-g32", "int5z", 32),
    WeightFormat("iq4_nl", "iq4_nl", 32),
    WeightFormat("iq4_xs", "iq4_xs", 32),
    WeightFormat("nvfp4", "nvfp4", 16),
    WeightFormat("q2_k", "q2_k", 16),
    WeightFormat("q3_k", "q3_k", 16),
    WeightFormat("iq3_xxs", "iq3_xxs", 32),
    WeightFormat("iq3_s", "iq3_s", 32),
    WeightFormat("iq2_xxs", "iq2_xxs", 32),
    WeightFormat("iq2_xs", "iq2_xs", 16),
    WeightFormat("iq2_s", "iq2_s", 16),
    WeightFormat("iq1_s", "iq1_s", 32),
    WeightFormat("iq1_m", "iq1_m", 16),
)

ALIASES = {
    "int4": "int4-g32", "int4z": "int4z-g32", "int5": "int5-g32", "int5z": "int5z-g32",
    "int8": "int8-g128",
}  # fmt: skip


def find_expert_format(name: str) -> ExpertFormat:
    """Return the format with this name, or with two names joined by "+".

    Raises the same error as `find_format`.
    """
    up, _, down = name.partition(_AND)
    return expert_format(find_format(up), find_format(down or up))


def find_format(name: str) -> WeightFormat:
    """Return the format of a name or alias in any case; `ConfigError` if there is none."""
    by_name, lower = {fmt.name: fmt for fmt in FORMATS}, name.lower()
    try:
        return by_name[ALIASES.get(lower, lower)]
    except KeyError:
        hint = nearest_names(name, [*by_name, *ALIASES])
        raise ConfigError(f"unknown weight format {name!r}; {hint}") from None
