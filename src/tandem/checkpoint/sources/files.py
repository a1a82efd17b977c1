"""The tensors of a checkpoint by name, in files that are mapped and read when asked for."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypedDict

from safetensors import safe_open
from torch import Tensor

from tandem.core.errors import ModelError

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
_HEADER_LENGTH_BYTES = 8

JsonObject = dict[str, Any]


class TensorHeader(TypedDict):
    """A tensor as a safetensors file announces it."""

    dtype: str
    shape: list[int]
    data_offsets: tuple[int, int]


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """What a file's header says of one tensor."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    num_bytes: int


class TensorFiles:
    """The safetensors files of a directory as one collection."""

    def __init__(self, directory: Path, entries: dict[str, TensorEntry]) -> None:
        """Serve these entries."""
        self.directory = directory
        self.entries = entries
        self._open: dict[Path, Any] = {}

    def __deepcopy__(self, memo: dict[int, object]) -> "TensorFiles":
        return self  # open files are not copied

    def read(self, name: str) -> Tensor:
        """Return a tensor; its memory is the mapped file's."""
        file = self.entries[name].file
        if file not in self._open:
            self._open[file] = safe_open(file, framework="pt")
        tensor: Tensor = self._open[file].get_tensor(name)
        return tensor

    def slice_of(self, name: str) -> Any:
        """Return the tensor unread, in the form in which Transformers' loader takes it."""
        file = self.entries[name].file
        if file not in self._open:
            self._open[file] = safe_open(file, framework="pt")
        return self._open[file].get_slice(name)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return a tensor's shape."""
        return self.entries[name].shape

    def num_bytes(self, *names: str) -> int:
        """Return what tensors take in their files."""
        return sum(self.entries[name].num_bytes for name in names)

    def __contains__(self, name: str) -> bool:
        return name in self.entries


def open_tensors(directory: Path, index_name: str | None = None) -> TensorFiles:
    """Return the tensors of a directory whose files are all there and whole.

    Raises `ModelError` naming the first file that is missing, truncated or damaged, or the tensor
    that two files hold.
    """
    if index_name is None and (directory / INDEX_FILE).exists():
        index_name = INDEX_FILE
    if index_name is None:
        if not (directory / SINGLE_FILE).exists():
            raise ModelError(
                f"{directory} has no weights: expected {SINGLE_FILE} or {INDEX_FILE}; "
                "is the download complete?"
            )
        return TensorFiles(directory, _entries(directory / SINGLE_FILE))
    weight_map = _weight_map(directory, index_name)
    entries: dict[str, TensorEntry] = {}
    for shard in dict.fromkeys(weight_map.values()):
        if not (directory / shard).exists():
            raise ModelError(f"{directory} lacks {shard}, which {index_name} names; download it")
        for name, entry in _entries(directory / shard).items():
            if name in entries:
                raise ModelError(
                    f"{directory} has tensor {name} twice, in {entries[name].file.name} and in "
                    f"{shard}; files of two downloads are mixed: download it again"
                )
            entries[name] = entry
    for name, shard in weight_map.items():
        if name not in entries or entries[name].file.name != Path(shard).name:
            raise ModelError(f"{directory / shard} lacks tensor {name}, which {index_name} names")
    return TensorFiles(directory, entries)


def read_header(file: Path) -> dict[str, TensorHeader]:
    """Return the tensors that a safetensors file announces; its size must agree with them."""
    size = file.stat().st_size
    damaged = f"{file} is damaged (its safetensors header cannot be read); download it again"
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(_HEADER_LENGTH_BYTES), "little")
        if size < _HEADER_LENGTH_BYTES or length > size - _HEADER_LENGTH_BYTES:
            raise ModelError(damaged)
        try:
            header = json.loads(stream.read(length))
            tensors = {k: v for k, v in header.items() if k != "__metadata__"}
            data_bytes = max((t["data_offsets"][1] for t in tensors.values()), default=0)
        except (ValueError, KeyError, TypeError, AttributeError, IndexError):
            raise ModelError(damaged) from None
    expected = _HEADER_LENGTH_BYTES + length + data_bytes
    if size != expected:
        raise ModelError(f"{file} has {size} bytes, expected {expected}; download it again")
    return tensors


def read_json(directory: Path, name: str) -> JsonObject:
    """Return a JSON object of a directory; raises `ModelError` if it is not one.

    A key that stands twice is an error, too: of an index it would name a tensor twice.
    """
    file = directory / name
    try:
        content = json.loads(
            file.read_text(encoding="utf-8"), object_pairs_hook=lambda pairs: _unique(file, pairs)
        )
    except FileNotFoundError:
        raise ModelError(f"{directory} has no {name}; expected a Transformers checkpoint") from None
    except ModelError:
        raise
    except ValueError as error:
        raise ModelError(f"{file} is not valid JSON ({error}); download it again") from None
    if not isinstance(content, dict):
        raise ModelError(f"{file} holds a {type(content).__name__}, expected a JSON object")
    return content


def _unique(file: Path, pairs: list[tuple[str, object]]) -> JsonObject:
    found: JsonObject = {}
    for key, value in pairs:
        if key in found and found[key] != value:
            raise ModelError(
                f"{file} names {key} twice, as {found[key]!r} and as {value!r}; download it again"
            )
        found[key] = value
    return found


def _weight_map(directory: Path, index_name: str) -> dict[str, str]:
    weight_map = read_json(directory, index_name).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelError(f"{directory / index_name} has no weight_map; download it again")
    return weight_map


def _entries(file: Path) -> dict[str, TensorEntry]:
    return {
        name: TensorEntry(
            file,
            str(tensor.get("dtype")),
            tuple(tensor.get("shape", ())),
            tensor["data_offsets"][1] - tensor["data_offsets"][0],
        )
        for name, tensor in read_header(file).items()
    }
