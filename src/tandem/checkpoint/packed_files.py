"""The index of a packed checkpoint, and the verification of its files.

The index has the SHA-256 of each file, the CRC-32 of each tensor, which locates damage, and the
CRC32C of each expert, for experts that are read one by one.
"""

import contextlib
import hashlib
import json
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, TypeGuard

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from tandem.checkpoint.file_writer import FileSums
from tandem.checkpoint.json_files import JsonObject, is_int, read_json, shown
from tandem.checkpoint.packed import (
    CHECKSUMS_KEY,
    EXPERT_SUMS_KEY,
    INDEX_FILE,
    TENSOR_SUMS_KEY,
    packed_name,
)
from tandem.checkpoint.sources.safetensors_header import TensorEntry, read_header
from tandem.core.errors import ModelError
from tandem.experts.store.packed_layer import STORED_NAME
from tandem.kernels import _native

_CHUNK_BYTES = 1 << 24
_MOST_SUM = (1 << 32) - 1
_DAMAGED = (
    "has other bytes than were written; the disk or a copy has damaged them: copy the file again, "
    "or pack the model again"
)
_AGAIN = "copy the index again, or pack the model again"


def experts_tensor(module: str) -> str:
    """Return the name of the tensor with the packed experts of an experts module."""
    return f"{module}.{packed_name(STORED_NAME)}"


def write_index(
    directory: Path, files: Mapping[str, Mapping[str, int]], sums: Mapping[str, FileSums]
) -> None:
    """Write the index of a packed checkpoint.

    `files` has the size in bytes of each tensor, by file and tensor name; `sums` has each file's
    checksums.
    """
    weight_map = {tensor: file for file, tensors in files.items() for tensor in tensors}
    total = sum(size for tensors in files.values() for size in tensors.values())
    metadata = {
        "total_size": total,
        CHECKSUMS_KEY: {file: sums[file].sha256 for file in files},
        TENSOR_SUMS_KEY: {name: crc for file in files for name, crc in sums[file].crc32.items()},
        EXPERT_SUMS_KEY: {n: c for file in files for n, c in sums[file].expert_crc32c.items()},
    }
    text = json.dumps({"metadata": metadata, "weight_map": weight_map}, indent=1) + "\n"
    (directory / INDEX_FILE).write_text(text, encoding="utf-8")


def read_metadata(directory: Path) -> JsonObject:
    """Return the metadata in a packed checkpoint's index; an empty object if it has none."""
    metadata = read_json(directory, INDEX_FILE).get("metadata")
    return metadata if isinstance(metadata, dict) else {}


def expert_sums(
    directory: Path, metadata: JsonObject, name: str, num_experts: int
) -> tuple[int, ...]:
    """Return the CRC32C of each expert of a tensor; empty if the index has no such checksums.

    Raises `ModelError` for malformed checksums.
    """
    found = metadata.get(EXPERT_SUMS_KEY)
    if found is None:  # packed by an older version
        return ()
    sums = found.get(name) if isinstance(found, dict) else None
    if not _are_sums(sums) or len(sums) != num_experts:
        raise ModelError(
            f"{directory / INDEX_FILE}: {EXPERT_SUMS_KEY} of {name} is {shown(sums)}, expected "
            f"{num_experts} numbers of 32 bits; {_AGAIN}"
        )
    return tuple(sums)


def _are_sums(value: object) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(is_int(x) and 0 <= x <= _MOST_SUM for x in value)


def require_as_written(file: Path, copied: FileSums) -> None:
    """Raise `ModelError` if a copied file's checksums differ from those in its index.

    If the index is of an older version, which has no checksums, nothing is compared.
    """
    metadata = read_metadata(file.parent)
    for name, sums in copied.expert_crc32c.items():
        expert = _first_other(sums, expert_sums(file.parent, metadata, name, len(sums)))
        if expert is not None:
            raise ModelError(f"{file}: expert {expert} of {name} {_DAMAGED}")
    known = metadata.get(TENSOR_SUMS_KEY)
    if not isinstance(known, dict):
        return
    for name, crc in copied.crc32.items():
        if name not in copied.expert_crc32c and known.get(name) != crc:
            raise ModelError(f"{file}: {name} {_DAMAGED}")


def _first_other(sums: Sequence[int], known: Sequence[object]) -> int | None:
    """Return the number of the first expert whose checksum differs from the known one, or None."""
    pairs = enumerate(zip(sums, known, strict=False))
    return next((expert for expert, (crc, expected) in pairs if crc != expected), None)


def require_checksums(
    directory: Path, on_bytes: Callable[[int], object] = lambda count: None
) -> int:
    """Verify all files of a packed checkpoint; return how many files were compared.

    Compares the SHA-256 of each file and the CRC32C of each expert. Raises `ModelError` naming the
    first bad file, and its first damaged tensor and expert. Returns 0 for a checkpoint without
    checksums. `on_bytes` gets the number of bytes read.
    """
    weight_map = read_json(directory, INDEX_FILE)["weight_map"]
    metadata = read_metadata(directory)
    if not metadata.get(CHECKSUMS_KEY):
        return 0
    files = dict.fromkeys(weight_map.values())
    for name in files:
        _require_sums(directory / name, metadata, on_bytes)
    return len(files)


def _require_sums(file: Path, metadata: JsonObject, on_bytes: Callable[[int], object]) -> None:
    checksums, experts = metadata[CHECKSUMS_KEY], _experts_in(file, metadata)
    expected = checksums.get(file.name) if isinstance(checksums, dict) else None
    if not isinstance(expected, str):
        raise ModelError(
            f"{file.with_name(INDEX_FILE)} has no SHA-256 of {file.name}, but of other files; "
            f"{_AGAIN}"
        )
    found, sums = _sums_of(file, experts, on_bytes)
    other = None if experts is None else _first_other(sums, experts.known)
    if found != expected:
        damage = _damage(file, metadata, experts, other)
        raise ModelError(
            f"{file} has the SHA-256 {found[:16]}..., expected {expected[:16]}..., {damage}; the "
            "disk or a copy has damaged it: pack the model again or copy the file again"
        )
    if experts is not None:
        expert_sums(file.parent, metadata, experts.name, experts.entry.shape[0])
        if other is not None:
            raise ModelError(
                f"{file.with_name(INDEX_FILE)}: the CRC-32C of expert {other} of {experts.name} is "
                f"{experts.known[other]}, and {file.name}, which has its SHA-256, holds one of "
                f"{sums[other]}; {_AGAIN}"
            )


def sha256_of(file: Path) -> str:
    """Return a file's SHA-256 in hex."""
    return _sums_of(file, None, lambda count: None)[0]


class _Experts(NamedTuple):
    """The tensor that holds a file's packed experts, one per row."""

    name: str
    entry: TensorEntry
    known: Sequence[object]
    """The index's checksums, one per expert; empty if it does not have one for each expert."""


def _experts_in(file: Path, metadata: JsonObject) -> _Experts | None:
    sums = metadata.get(EXPERT_SUMS_KEY)
    with contextlib.suppress(ModelError):  # its SHA-256 reports a damaged header
        for name, entry in read_header(file).items():
            if name == experts_tensor(name.rpartition(".")[0]) and len(entry.shape) == 2:
                found = sums.get(name) if isinstance(sums, dict) else None
                if isinstance(found, list) and len(found) == entry.shape[0]:
                    return _Experts(name, entry, found)
                return _Experts(name, entry, ())
    return None


def _sums_of(
    file: Path, experts: _Experts | None, on_bytes: Callable[[int], object]
) -> tuple[str, list[int]]:
    """Read a file once; return its SHA-256, and each expert's CRC32C if the index has checksums."""
    digest, sums = hashlib.sha256(), list[int]()
    room = np.empty(_CHUNK_BYTES, np.uint8)
    with file.open("rb") as stream:

        def take(left: int) -> int:
            count = stream.readinto(room[: min(left, _CHUNK_BYTES)].data)
            digest.update(room[:count].data)
            on_bytes(count)
            return count

        if experts is not None and experts.known:
            left = experts.entry.first
            while left > 0 and (count := take(left)):
                left -= count
            for _ in experts.known:
                crc, left = 0, experts.entry.num_bytes // len(experts.known)
                while left > 0 and (count := take(left)):
                    crc, left = _native.crc32c(room[:count], crc), left - count
                sums.append(crc)
        while take(_CHUNK_BYTES):
            pass
    return digest.hexdigest(), sums


def _damage(file: Path, metadata: JsonObject, experts: _Experts | None, expert: int | None) -> str:
    """Return a clause that names the damaged tensor of a file, and its damaged expert if known."""
    sums = metadata.get(TENSOR_SUMS_KEY)
    if not isinstance(sums, dict):  # packed by an older version
        return "in one of its tensors or its header"
    with contextlib.suppress(SafetensorError), safe_open(file, "pt") as opened:
        for name in opened.keys():  # noqa: SIM118
            if sums.get(name) != _crc32_of(opened.get_tensor(name)):
                is_theirs = experts is not None and name == experts.name and expert is not None
                where = f", of expert {expert} first" if is_theirs else ""
                return f"and tensor {name} other bytes than were written{where}"
    return "in its header"


def _crc32_of(tensor: Tensor) -> int:
    return zlib.crc32(tensor.reshape(-1).view(torch.uint8).numpy().data)
