"""The weight formats by name: what each stores and what it costs. Knows no tensors."""

from dataclasses import dataclass
from typing import Literal

from tandem.core.errors import ConfigError
from tandem.core.registry import nearest_names

# Stored in packed files; any change of where a byte goes, or of what it means, raises it.
LAYOUT_VERSION = 1

ROWS_PER_BLOCK = 16  # one 512-bit register holds one dword of each row
SECTION_ALIGNMENT_BYTES = 64  # one cache line

Kind = Literal["int4", "int4z", "int8", "mxfp4", "fp8", "bf16", "fp16"]

_BITS: dict[Kind, int] = {
    "int4": 4,
    "int4z": 4,
    "int8": 8,
    "mxfp4": 4,
    "fp8": 8,
    "bf16": 16,
    "fp16": 16,
}
# Bytes of scales per group of one row; fp8 has one fp32 scale for the 16 rows of a block.
_SCALE_BYTES: dict[Kind, float] = {
    "int4": 2,
    "int4z": 4,
    "int8": 2,
    "mxfp4": 1,
    "fp8": 4 / ROWS_PER_BLOCK,
    "bf16": 0,
    "fp16": 0,
}


@dataclass(frozen=True, slots=True)
class WeightFormat:
    """One way to store weights; `docs/formats.md` says where each byte lies."""

    name: str
    kind: Kind
    group_size: int | None = None
    """Columns that share a scale; None where there are no scales."""

    @property
    def bits(self) -> int:
        """Bits of one weight's code, without scales."""
        return _BITS[self.kind]

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
        return self.bits + 8 * _SCALE_BYTES[self.kind] / self.group_size

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
        return int(self.padded_rows(rows) * groups * _SCALE_BYTES[self.kind])


def _grouped(kind: Kind) -> tuple[WeightFormat, ...]:
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
