"""The tensors of a checkpoint by name, in mapped files; each is read when it is used."""

from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, TypeGuard

from safetensors import safe_open
from torch import Tensor

from tandem.checkpoint.json_files import read_json, shown
from tandem.checkpoint.sources.safetensors_header import TensorEntry, read_header
from tandem.core.errors import ModelError

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
_LONGEST_NAME = 255  # bytes; the limit of file systems


class TensorFiles:
    """The safetensors files of a directory as one collection."""

    def __init__(self, directory: Path, entries: dict[str, TensorEntry]) -> None:
        """Store the tensors' entries, by name; files are opened when they are first read."""
        self.directory = directory
        self.entries = entries
        self._open: dict[Path, Any] = {}

    def read(self, name: str) -> Tensor:
        """Return a tensor as a view of its mapped file."""
        file = self.entries[name].file
        if file not in self._open:
            self._open[file] = safe_open(file, framework="pt")
        tensor: Tensor = self._open[file].get_tensor(name)
        return tensor

    def slice_of(self, name: str) -> Any:
        """Return the unread tensor as safetensors' slice, which Transformers' loader indexes."""
        file = self.entries[name].file
        if file not in self._open:
            self._open[file] = safe_open(file, framework="pt")
        return self._open[file].get_slice(name)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return a tensor's shape."""
        return self.entries[name].shape

    def num_bytes(self, *names: str) -> int:
        """Return the bytes that the tensors take in their files."""
        return sum(self.entries[name].num_bytes for name in names)

    def layers_with(self, first: str, others: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
        """Yield (prefix, tensor names) of each linear layer that has a tensor `PREFIX.first`.

        The names are `PREFIX.first` and, for those of `others` that the layer has, `PREFIX.other`.
        """
        for name in self.entries:
            prefix, _, part = name.rpartition(".")
            if part == first:
                yield prefix, [n for p in (first, *others) if (n := f"{prefix}.{p}") in self]

    def __contains__(self, name: str) -> bool:
        return name in self.entries


def open_tensors(directory: Path, index_name: str | None = None) -> TensorFiles:
    """Return the tensors of a directory after checking that all files exist and are complete.

    Raises `ModelError` naming the first missing, truncated or damaged file, or a tensor that
    occurs in two files.
    """
    if index_name is None and (directory / INDEX_FILE).exists():
        index_name = INDEX_FILE
    if index_name is None:
        if not (directory / SINGLE_FILE).exists():
            raise ModelError(
                f"{directory} has no weights: expected {SINGLE_FILE} or {INDEX_FILE}; "
                "is the download complete?"
            )
        return TensorFiles(directory, read_header(directory / SINGLE_FILE))
    weight_map = _weight_map(directory, index_name)
    entries: dict[str, TensorEntry] = {}
    for shard in dict.fromkeys(weight_map.values()):
        if not (directory / shard).exists():
            raise ModelError(f"{directory} lacks {shard}, which {index_name} names; download it")
        for name, entry in read_header(directory / shard).items():
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


def _weight_map(directory: Path, index_name: str) -> dict[str, str]:
    """Return each tensor's file name from the index; `ModelError` if the index is damaged.

    A file outside of `directory` counts as damage.
    """
    index = read_json(directory, index_name)
    weight_map, metadata = index.get("weight_map"), index.get("metadata", {})
    if not isinstance(metadata, dict):
        raise ModelError(
            f"{directory / index_name}: metadata is {shown(metadata)}, expected an object"
        )
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelError(f"{directory / index_name} has no weight_map; download it again")
    for name, shard in weight_map.items():
        if not is_inside(shard):
            raise ModelError(
                f"{directory / index_name} says that {shown(name)} is in {shown(shard)}, expected "
                "the name of a file in its directory; download it again"
            )
    return weight_map


def is_inside(name: object) -> TypeGuard[str]:
    """Whether a value is a relative path that stays inside the directory it is relative to.

    Links out of the directory are allowed: the hub's cache has them, and a malicious checkpoint
    cannot create them.
    """
    if not isinstance(name, str) or not name.isprintable() or "\\" in name:
        return False
    if len(name.encode()) > _LONGEST_NAME:
        return False
    parts = PurePosixPath(name).parts
    return bool(parts) and ".." not in parts and parts[0] != "/"
