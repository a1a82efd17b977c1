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
Scale = Literal["fp16", "fp32", "e8m0"]
_SCALE_BYTES: dict[Scale, int] = {"fp16": 2, "fp32": 4, "e8m0": 1}


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

    @property
    def scale_bytes(self) -> float:
        """Bytes of scales and minima per group of one row."""
        if self.scale is None:
            return 0.0
        return _SCALE_BYTES[self.scale] * (2 if self.has_minima else 1) / self.rows_per_scale


_ENCODINGS = {
    "bf16": Encoding(0, 16, "bf16"),
    "fp16": Encoding(5, 16, "fp16"),
    "int8": Encoding(1, 8, "integer", "fp16", codes=(-128, 127), offset=128),
    "fp8": Encoding(6, 8, "e4m3", "fp32", rows_per_scale=ROWS_PER_BLOCK),
    "int4": Encoding(2, 4, "integer", "fp16", codes=(-8, 7), offset=8),
    "int4z": Encoding(3, 4, "integer", "fp16", codes=(0, 15), has_minima=True),
    "mxfp4": Encoding(4, 4, "e2m1", "e8m0", codes=(0, 15)),
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
        return self.group_size or 8

    @property
    def weights_per_dword(self) -> int:
        """Columns of one row that lie in one 4-byte word."""
        return 32 // self.bits

    @property
    def bits_per_weight(self) -> float:
        """Bits of one weight with its share of the scales, without padding."""
        if self.group_size is None:
            return float(self.bits)
        return self.bits + 8 * self.encoding.scale_bytes / self.group_size

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
        groups = self.padded_cols(cols) // self.group_size
        return int(self.padded_rows(rows) * groups * self.encoding.scale_bytes)


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
)

ALIASES = {"int4": "int4-g32", "int4z": "int4z-g32", "int8": "int8-g128"}


def find_format(name: str) -> WeightFormat:
    """Return the format of a name or alias, in any case; `ConfigError` with near names else."""
    by_name, lower = {fmt.name: fmt for fmt in FORMATS}, name.lower()
    try:
        return by_name[ALIASES.get(lower, lower)]
    except KeyError:
        hint = nearest_names(name, [*by_name, *ALIASES])
        raise ConfigError(f"unknown weight format {name!r}; {hint}") from None
