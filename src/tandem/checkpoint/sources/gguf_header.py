"""The header of a GGUF file, of one part or several: metadata, and each tensor's place.

The file is not trusted: every length is compared with the file's size before anything is read or
allocated.
"""

import math
import mmap
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from tandem.checkpoint.config_sizes import HeldTensors
from tandem.checkpoint.json_files import shown
from tandem.core.errors import ModelError, UnsupportedModelError

# The value of a header's field: a string, a number, a boolean or a list of one of these.
Value: TypeAlias = Any

_UNREADABLE = "{file} cannot be read as GGUF ({reason}); download it again"
_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_ALIGNMENT = 32  # the default of GGUF
_MOST_DIMENSIONS = 4
_LONGEST_NAME = 512
# Number of a value type -> its format in `struct` and in numpy.
_SCALARS = {
    0: ("B", "<u1"), 1: ("b", "<i1"), 2: ("H", "<u2"), 3: ("h", "<i2"), 4: ("I", "<u4"),
    5: ("i", "<i4"), 6: ("f", "<f4"), 7: ("?", "<u1"), 10: ("Q", "<u8"), 11: ("q", "<i8"),
    12: ("d", "<f8"),
}  # fmt: skip
_STRING, _ARRAY = 8, 9
_NUMPY_TYPES = {"F32": "<f4", "F16": "<f2"}  # other types are raw bytes
# Types of values by key. Keys that match neither pattern hold counts, one for all layers or one per
# layer.
_TEXTS = re.compile(r".*\.rope\.scaling\.type|tokenizer\.ggml\.model")
_NUMBERS = re.compile(
    r".*(epsilon|freq_base(_swa)?|factor|scale|multiplier|softcapping|clamp_kqv|beta_(fast|slow)"
    r"|lower_bound|swiglu_clamp_(sh)?exp)"
)
_MOST_COUNTED = 1 << 31
_EXPERTS = ("ffn_up_exps", "ffn_gate_up_exps")
PART = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """A tensor in its GGUF file, unread."""

    name: str
    shape: tuple[int, ...]
    """The dimensions, the row length first."""
    tensor_type: IntEnum
    """The type from the gguf package."""
    data_offset: int
    n_bytes: int
    data: npt.NDArray[np.generic] = field(repr=False)
    """A view of the mapped file; the last dimension is the row length, in elements for F32 and F16,
    in bytes for all other types."""


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """The metadata of a GGUF file, and its unread tensors by name."""

    file: Path
    """The file; the first one of a split model."""
    architecture: str
    fields: Mapping[str, Value]
    """Numbers, strings and arrays of numbers; an array of strings is replaced by its length."""
    tensors: Mapping[str, GgufTensor]

    def value(self, key: str, default: Value = None) -> Value:
        """Return a metadata value by its key without the architecture's prefix."""
        return self.at(f"{self.architecture}.{key}", default)

    def at(self, key: str, default: Value = None) -> Value:
        """Return a metadata value by its whole key; `ModelError` if it is invalid for the key."""
        value = self.fields.get(key)
        if value is None:
            return default
        expected = _why_not(key, value)
        if expected:
            raise ModelError(
                f"{self.file} says that its {key} is {shown(value)}, expected {expected}; "
                "download it again"
            )
        return value

    def rows(self, tensor_name: str) -> int | None:
        """Return the number of rows (outputs) of a matrix, or of each expert's matrix.

        Returns None if the file has no such tensor, or if the tensor is a vector.
        """
        tensor = self.tensors.get(tensor_name)
        return None if tensor is None or len(tensor.shape) < 2 else tensor.shape[1]

    @property
    def held(self) -> HeldTensors:
        """Upper limits on layers and weights, from the tensors, to check the config against."""
        elements = sum(math.prod(tensor.shape) for tensor in self.tensors.values())
        return HeldTensors(self.tensors, len(self.tensors), elements)

    @property
    def experts(self) -> GgufTensor | None:
        """A tensor of some layer's experts: up, or gate and up together; None without experts."""
        ends = (f"{end}.weight" for end in _EXPERTS)
        return next((t for end in ends for name, t in self.tensors.items() if end in name), None)

    @property
    def expert_width(self) -> int | None:
        """The intermediate size of the experts; None without experts."""
        experts = self.experts
        if experts is None or len(experts.shape) < 2:
            return None
        return experts.shape[1] // (2 if _EXPERTS[-1] in experts.name else 1)


def _why_not(key: str, value: Value) -> str:
    """Return what a key's value should be instead; empty if the value is valid for the key."""
    if _TEXTS.fullmatch(key):
        return "" if isinstance(value, str) else "a text"
    several = value if isinstance(value, list) else [value]
    if _NUMBERS.fullmatch(key):
        are_finite = all(isinstance(one, int | float) and math.isfinite(one) for one in several)
        if "freq_base" in key and are_finite and min(several, default=1) <= 0:
            return "a number above 0"
        return "" if are_finite else "a finite number"
    are_counts = all(isinstance(one, int) and 0 <= one < _MOST_COUNTED for one in several)
    return "" if are_counts else f"whole numbers from 0, below {_MOST_COUNTED}"


def read_header(file: Path) -> GgufHeader:
    """Read and join the headers of all parts of a GGUF model; tensors stay unread.

    Raises `ModelError`, one sentence, for a damaged file or a missing part.
    """
    files = parts_of(file)
    fields: dict[str, Value] = {}
    tensors: dict[str, GgufTensor] = {}
    for part in files:
        of_part, own = read_part(part)
        if len(files) > 1:
            _check_part(part, of_part, files)
        fields = of_part | fields  # the first part wins
        if again := tensors.keys() & own.keys():
            raise ModelError(_UNREADABLE.format(file=part, reason=f"{min(again)} occurs twice"))
        tensors |= own
    architecture = fields.get("general.architecture")
    if not isinstance(architecture, str) or len(architecture) > _LONGEST_NAME:
        raise ModelError(
            _UNREADABLE.format(file=files[0], reason="it does not name its architecture")
        )
    header = GgufHeader(files[0], architecture, fields, tensors)
    if len(files) > 1 and (count := fields.get("split.tensors.count")) not in (None, len(tensors)):
        raise ModelError(
            f"{files[0]} and its other parts have {len(tensors)} tensors, expected {count}; "
            "download them again"
        )
    return header


def parts_of(file: Path) -> list[Path]:
    """Return all parts of the model that `file` belongs to, in order; [`file`] if it has no parts.

    Raises `ModelError` if a part is missing.
    """
    found = PART.fullmatch(file.name)
    if found is None:
        return [file]
    count = int(found["count"])
    if not 0 < int(found["number"]) <= count:
        raise ModelError(
            f"{file} is part {int(found['number'])} of {count} by its name; give it back its name"
        )
    names = (f"{found['stem']}-{n + 1:05}-of-{count:05}.gguf" for n in range(count))
    files = []
    for name in names:
        part = file.with_name(name)
        if not part.is_file():
            raise ModelError(
                f"{part} is not there, and {file.name} is one of {count} parts of a model; "
                "download all of them into one directory"
            )
        files.append(part)
    return files


def _check_part(part: Path, fields: Mapping[str, Value], files: list[Path]) -> None:
    number, count = fields.get("split.no"), fields.get("split.count")
    if (number, count) != (files.index(part), len(files)):
        raise ModelError(
            f"{part} says that it is part {number} of {count} (from 0), and its name says part "
            f"{files.index(part)} of {len(files)}; give it back its name or download it again"
        )


def read_part(file: Path) -> tuple[dict[str, Value], dict[str, GgufTensor]]:
    """Return the metadata and unread tensors of one file; `ModelError` if it is damaged."""
    try:
        with file.open("rb") as opened:
            mapped = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as error:
        raise ModelError(f"{file} cannot be opened ({error.strerror})") from error
    except ValueError as error:
        raise ModelError(_UNREADABLE.format(file=file, reason="it is empty")) from error
    try:
        return _Reader(mapped).read()
    except _DamagedError as error:
        raise ModelError(_UNREADABLE.format(file=file, reason=error)) from error


class _DamagedError(Exception):
    """Damage of a file; the message is a clause that says what is wrong."""


class _Reader:
    """Reads a mapped file from its beginning to the end of its header."""

    def __init__(self, mapped: mmap.mmap) -> None:
        self._mapped = mapped
        self._size = len(mapped)
        self._at = 0

    def read(self) -> tuple[dict[str, Value], dict[str, GgufTensor]]:
        if self._take(4, "its magic") != _MAGIC:
            raise _DamagedError("its first bytes are not GGUF")
        version = self._scalar("I")
        if version not in _VERSIONS:
            raise _DamagedError(f"its version is {version}, expected 2 or 3")
        num_tensors, num_fields = self._scalar("Q"), self._scalar("Q")
        fields: dict[str, Value] = {}
        for _ in range(num_fields):  # the end of the data ends the loop if num_fields is wrong
            key = self._name("a name of its metadata")
            if key in fields:
                raise _DamagedError(f"{key} occurs twice")
            fields[key] = self._value(self._scalar("I"), key)
        infos = [self._tensor_info() for _ in range(self._counted(num_tensors, 24, "tensors"))]
        begin = _aligned(self._at, fields.get("general.alignment", _ALIGNMENT))
        tensors: dict[str, GgufTensor] = {}
        for name, shape, kind, offset in infos:
            if name in tensors:
                raise _DamagedError(f"{name} occurs twice")
            tensors[name] = self._tensor(name, shape, kind, begin + offset)
        return fields, tensors

    def _take(self, count: int, what: str) -> bytes:
        if count > self._size - self._at:
            raise _DamagedError(f"it ends in {what}")
        taken = self._mapped[self._at : self._at + count]
        self._at += count
        return taken

    def _scalar(self, kind: str) -> Value:
        return struct.unpack(f"<{kind}", self._take(struct.calcsize(f"<{kind}"), "its header"))[0]

    def _counted(self, count: int, least_bytes: int, what: str) -> int:
        """Return `count`; `_DamagedError` if the rest of the file cannot hold so many items."""
        if count * least_bytes > self._size - self._at:
            raise _DamagedError(f"it should have {count} {what}, but ends before them")
        return count

    def _name(self, what: str) -> str:
        length = self._scalar("Q")
        if length > _LONGEST_NAME:
            raise _DamagedError(f"{what} has {length} bytes")
        name = self._text(length, what)
        if not name.isprintable():
            raise _DamagedError(f"{what} is {name!r}")
        return name

    def _text(self, length: int, what: str) -> str:
        try:
            return self._take(length, what).decode()
        except UnicodeDecodeError as error:
            raise _DamagedError(f"{what} is not text") from error

    def _value(self, kind: int, key: str) -> Value:
        if kind in _SCALARS:
            return self._scalar(_SCALARS[kind][0])
        if kind == _STRING:
            return self._text(self._scalar("Q"), key)
        if kind == _ARRAY:
            return self._array(self._scalar("I"), self._scalar("Q"), key)
        raise _DamagedError(f"{key} has a value of unknown type {kind}")

    def _array(self, kind: int, count: int, key: str) -> Value:
        """Return an array of numbers as a list, and an array of strings as its length."""
        if kind in _SCALARS:
            dtype = np.dtype(_SCALARS[kind][1])
            size = self._counted(count, dtype.itemsize, f"values of {key}") * dtype.itemsize
            return np.frombuffer(self._take(size, key), dtype).tolist()
        if kind != _STRING:
            raise _DamagedError(f"{key} is an array of unknown type {kind}")
        for _ in range(self._counted(count, 8, f"values of {key}")):
            length = self._scalar("Q")
            if length > self._size - self._at:
                raise _DamagedError(f"it ends in {key}")
            self._at += length
        return count

    def _tensor_info(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self._name("a name of a tensor")
        num_dimensions = self._scalar("I")
        if not 0 < num_dimensions <= _MOST_DIMENSIONS:
            raise _DamagedError(f"{name} has {num_dimensions} dimensions")
        shape = tuple(self._scalar("Q") for _ in range(num_dimensions))
        return name, shape, self._scalar("I"), self._scalar("Q")

    def _tensor(self, name: str, shape: tuple[int, ...], kind: int, offset: int) -> GgufTensor:
        block, kind_bytes, tensor_type = _kind(name, kind)
        count = 1
        for length in shape:
            count *= length  # Python's integers do not overflow
        if count == 0 or shape[0] % block:
            raise _DamagedError(f"{name} has the shape {shape}, in blocks of {block}")
        num_bytes = count // block * kind_bytes
        if num_bytes + offset > self._size:
            raise _DamagedError(
                f"the file has {self._size} bytes, and {name} ends at {offset + num_bytes}"
            )
        dtype = np.dtype(_NUMPY_TYPES.get(tensor_type.name, "u1"))
        flat = np.frombuffer(self._mapped, dtype, num_bytes // dtype.itemsize, offset)
        data = flat.reshape(*reversed(shape[1:]), -1)
        return GgufTensor(name, shape, tensor_type, offset, num_bytes, data)


def _kind(name: str, kind: int) -> tuple[int, int, IntEnum]:
    """Return how many numbers and bytes a block of type `kind` has, and gguf's enum member."""
    try:
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
    except ImportError as error:
        raise UnsupportedModelError(
            "GGUF files need the gguf package, which is not installed; pip install gguf"
        ) from error
    try:
        found = GGMLQuantizationType(kind)
    except ValueError as error:
        raise _DamagedError(
            f"{name} is of type {kind}, which the gguf package does not know"
        ) from error
    block, kind_bytes = GGML_QUANT_SIZES[found]
    return block, kind_bytes, found


def _aligned(offset: int, alignment: object) -> int:
    if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
        raise _DamagedError(f"general.alignment is {alignment}, expected a power of two")
    return -(-offset // alignment) * alignment
