"""The header of a safetensors file: where each tensor lies, checked against the file's bytes."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import TypeGuard

from tandem.checkpoint.json_files import DamagedJsonError, is_int, parse_json, shown
from tandem.core.errors import ModelError

_HEADER_LENGTH_BYTES = 8
_LONGEST_HEADER = 100_000_000  # safetensors' own limit
_MOST_DIMENSIONS = 16
_LONGEST_NAME = 512
_BITS = {
    "BOOL": 8, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8,
    "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8, "I16": 16, "U16": 16, "F16": 16, "BF16": 16,
    "I32": 32, "U32": 32, "F32": 32, "C64": 64, "F64": 64, "I64": 64, "U64": 64,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor in a file's header."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    num_bytes: int
    first: int
    """Offset of its first byte in the file."""

    @property
    def most_elements(self) -> int:
        """The largest number of weights that the bytes can hold; a code may have a single bit."""
        bits = _BITS[self.dtype]
        is_float = self.dtype.startswith(("F", "BF")) and bits >= 8
        return math.prod(self.shape) if is_float else self.num_bytes * 8


def read_header(file: Path) -> dict[str, TensorEntry]:
    """Return the tensors that a safetensors header lists, checked against the file's size.

    Raises `ModelError` for a damaged file, and unless the tensors cover each byte of the data
    exactly once.
    """
    if not file.is_file():
        raise ModelError(f"{file} is not a file; expected safetensors")
    size = file.stat().st_size
    try:
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(_HEADER_LENGTH_BYTES), "little")
            if size < _HEADER_LENGTH_BYTES or length > size - _HEADER_LENGTH_BYTES:
                raise DamagedJsonError(f"it ends before its header of {length} bytes")
            if length > _LONGEST_HEADER:
                raise DamagedJsonError(f"it has {length} bytes, expected at most {_LONGEST_HEADER}")
            header = parse_json(stream.read(length))
        data_bytes = size - _HEADER_LENGTH_BYTES - length
        return _entries(file, header, _HEADER_LENGTH_BYTES + length, data_bytes)
    except OSError as error:
        raise ModelError(f"{file} cannot be read ({error.strerror})") from error
    except DamagedJsonError as error:
        raise ModelError(f"{file} is damaged (its header: {error}); download it again") from None


def _entries(
    file: Path, header: object, header_bytes: int, data_bytes: int
) -> dict[str, TensorEntry]:
    if not isinstance(header, dict):
        raise DamagedJsonError(f"it holds {shown(header)}, expected an object")
    _require_metadata(header.pop("__metadata__", {}))
    entries = {name: _entry(file, header_bytes, name, fields) for name, fields in header.items()}
    at = 0
    for name, entry in sorted(entries.items(), key=lambda one: (one[1].first, one[1].num_bytes)):
        if entry.first - header_bytes != at:
            raise DamagedJsonError(
                f"{name} begins at byte {entry.first - header_bytes} of the data, expected {at}"
            )
        at += entry.num_bytes
    if at != data_bytes:
        raise ModelError(
            f"{file} has {header_bytes + data_bytes} bytes, expected {header_bytes + at}; "
            "download it again"
        )
    return entries


def _require_metadata(metadata: object) -> None:
    if not isinstance(metadata, dict) or not all(isinstance(x, str) for x in metadata.values()):
        raise DamagedJsonError(f"__metadata__ is {shown(metadata)}, expected texts by name")


def _entry(file: Path, header_bytes: int, name: str, fields: object) -> TensorEntry:
    """Return a tensor's entry, from its `fields` in a header; `DamagedJsonError` if invalid."""
    if len(name) > _LONGEST_NAME or not name.isprintable():
        raise DamagedJsonError(f"a tensor is called {shown(name)}")
    if not isinstance(fields, dict):
        raise DamagedJsonError(f"{name} is {shown(fields)}, expected an object")
    dtype, shape, offsets = (fields.get(key) for key in ("dtype", "shape", "data_offsets"))
    if not isinstance(dtype, str) or dtype not in _BITS:
        expected = ", ".join(_BITS)
        raise DamagedJsonError(f"of {name} dtype is {shown(dtype)}, expected one of {expected}")
    if not _are_sizes(shape) or len(shape) > _MOST_DIMENSIONS:
        raise DamagedJsonError(
            f"of {name} shape is {shown(shape)}, expected a list of whole numbers from 0"
        )
    if not _are_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise DamagedJsonError(
            f"of {name} data_offsets is {shown(offsets)}, expected two whole numbers, the first "
            "byte and the one after the last"
        )
    begin, end = offsets
    num_bits = math.prod(shape) * _BITS[dtype]
    if num_bits != (end - begin) * 8:
        raise DamagedJsonError(
            f"{name} takes {shown(num_bits // 8)} bytes by its shape {shown(shape)} of {dtype}, "
            f"and {shown(end - begin)} by its data_offsets"
        )
    return TensorEntry(file, dtype, tuple(shape), end - begin, header_bytes + begin)


def _are_sizes(value: object) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(is_int(one) and one >= 0 for one in value)
