"""The weight formats by name: what each stores and what it costs. Knows no tensors."""

from dataclasses import dataclass
from typing import Literal

from tandem.core.errors import ConfigError
from tandem.core.registry import nearest_names

# Stored in packed files; any change of where a byte goes, or of what it means, raises it.
LAYOUT_VERSION = 1

ROWS_PER_BLOCK = 16  # one 512-bit register holds one dword of each row
SECTION_ALIGNMENT_BYTES = 64  # one cache line

Element = Literal["integer", "e2m1", "e4m3", "bf16", "fp16"]
Scale = Literal["fp16", "fp32", "e8m0", "int8"]
_SCALE_BYTES: dict[Scale, int] = {"fp16": 2, "fp32": 4, "e8m0": 1, "int8": 1}
_SUPER_SCALE_BYTES = 2  # fp16


@dataclass(frozen=True, slots=True)
class Encoding:
    """What a weight is stored as, and what a group's scale is; everything else asks this record."""

    number: int
    """What `csrc/packed.hpp` calls it."""
    bits: int
    element: Element
    scale: Scale | None = None
    rows_per_scale: int = 1
    has_minima: bool = False
    """Whether each scale is followed by what is added after it, of the same type."""
    codes: tuple[int, int] = (0, 0)
    """Lowest and highest code as checkpoints give them."""
    offset: int = 0
    """What is added to a code to store it; the stored code of zero."""
    super_cols: int = 0
    """Columns whose scales (and minima) are whole numbers of an fp16 super-scale; 0: none."""

    @property
    def scale_bytes(self) -> float:
        """Bytes of scales and minima per group of one row."""
        if self.scale is None:
            return 0.0
        return _SCALE_BYTES[self.scale] * self.lines / self.rows_per_scale

    @property
    def lines(self) -> int:
        """Numbers of a group beside its codes: a scale, or a scale and a minimum."""
        return 2 if self.has_minima else 1

    @property
    def super_bytes(self) -> int:
        """Bytes of the super-scales of one row and super-block."""
        return _SUPER_SCALE_BYTES * self.lines if self.super_cols else 0

    @property
    def planes(self) -> tuple[int, ...]:
        """Widths of the planes that a code's bits lie in, the lowest bits first."""
        widths = (16, 8, 4, 2, 1)
        return tuple(width for width in widths if self.bits & width)


def _super_blocks(
    number: int, bits: int, *, codes: tuple[int, int], has_minima: bool = False
) -> Encoding:
    """Return the encoding of a K-quant of llama.cpp."""
    return Encoding(
        number, bits, "integer", "int8", has_minima=has_minima, codes=codes, offset=-codes[0],
        super_cols=256,
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
}


@dataclass(frozen=True, slots=True)
class WeightFormat:
    """One way to store weights; `docs/formats.md` says where each byte lies."""

    name: str
    kind: str
    group_size: int | None = None
    """Columns that share a scale; None where there are no scales."""

    @property
    def encoding(self) -> Encoding:
        """How its kind of format stores a weight."""
        return _ENCODINGS[self.kind]

    @property
    def bits(self) -> int:
        """Bits of one weight's code, without scales."""
        return self.encoding.bits

    @property
    def col_multiple(self) -> int:
        """Columns are padded with zeros to a multiple of this."""
        return self.encoding.super_cols or self.group_size or 8

    @property
    def weights_per_dword(self) -> int:
        """Columns of one row that lie in one 4-byte word, of formats whose bits are one plane."""
        return 32 // self.bits

    def dwords(self, cols: int) -> int:
        """Return the 4-byte words of one row's codes, padding included."""
        return self.padded_cols(cols) * self.bits // 32

    @property
    def bits_per_weight(self) -> float:
        """Bits of one weight with its share of the scales, without padding."""
        if self.group_size is None:
            return float(self.bits)
        encoding = self.encoding
        share = encoding.scale_bytes / self.group_size
        if encoding.super_cols:
            share += encoding.super_bytes / encoding.super_cols
        return self.bits + 8 * share

    def padded_rows(self, rows: int) -> int:
        """Round up to whole blocks of 16 rows."""
        return -(-rows // ROWS_PER_BLOCK) * ROWS_PER_BLOCK

    def padded_cols(self, cols: int) -> int:
        """Round up to whole groups."""
        return -(-cols // self.col_multiple) * self.col_multiple

    def data_bytes(self, rows: int, cols: int) -> int:
        """Bytes that the codes of a (rows, cols) matrix take, padding included."""
        return self.padded_rows(rows) * self.padded_cols(cols) * self.bits // 8

    def scale_bytes(self, rows: int, cols: int) -> int:
        """Bytes that the scales (and minima) of a (rows, cols) matrix take, padding included."""
        if self.group_size is None:
            return 0
        width, encoding = self.padded_cols(cols), self.encoding
        one_row = width // self.group_size * encoding.scale_bytes
        if encoding.super_cols:
            one_row += width // encoding.super_cols * encoding.super_bytes
        return int(self.padded_rows(rows) * one_row)


@dataclass(frozen=True, slots=True)
class MixedFormat:
    """The formats of experts whose first and second projections have different ones."""

    up: WeightFormat
    down: WeightFormat

    @property
    def name(self) -> str:
        """Both names, as an `expert_dtype` gives them."""
        return f"{self.up.name}{_AND}{self.down.name}"


ExpertFormat = WeightFormat | MixedFormat
_AND = "+"


def formats_of(fmt: ExpertFormat) -> tuple[WeightFormat, WeightFormat]:
    """Return the formats of the first and the second projection."""
    return (fmt.up, fmt.down) if isinstance(fmt, MixedFormat) else (fmt, fmt)


def expert_format(up: WeightFormat, down: WeightFormat) -> ExpertFormat:
    """Return one format for both projections, or a mixed one."""
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
)

ALIASES = {"int4": "int4-g32", "int4z": "int4z-g32", "int8": "int8-g128"}


def find_expert_format(name: str) -> ExpertFormat:
    """Return the format of a name, or of two with a "+" between them; raises as `find_format`."""
    up, _, down = name.partition(_AND)
    return expert_format(find_format(up), find_format(down or up))


def find_format(name: str) -> WeightFormat:
    """Return the format of a name or alias, in any case; `ConfigError` with near names else."""
    by_name, lower = {fmt.name: fmt for fmt in FORMATS}, name.lower()
    try:
        return by_name[ALIASES.get(lower, lower)]
    except KeyError:
        hint = nearest_names(name, [*by_name, *ALIASES])
        raise ConfigError(f"unknown weight format {name!r}; {hint}") from None
