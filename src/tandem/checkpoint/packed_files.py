"""Writes and checks the files of packed checkpoints: whole or not there, each with its checksum.

The index has the SHA-256 of each file, and the CRC-32 of each tensor, which says where damage is.
"""

import contextlib
import hashlib
import json
import os
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from tandem.checkpoint.json_files import read_json
from tandem.checkpoint.packed import CHECKSUMS_KEY, INDEX_FILE, TENSOR_SUMS_KEY
from tandem.core.errors import ModelError

_CHUNK_BYTES = 1 << 24


class FileSums(NamedTuple):
    """A file's SHA-256 in hex, and the CRC-32 of each of its tensors."""

    sha256: str
    crc32: dict[str, int]


def write_tensors(directory: Path, name: str, tensors: dict[str, Tensor]) -> FileSums:
    """Write a safetensors file, which appears when it is on the disk; return its sums.

    Raises `OSError`, and leaves no part of the file.
    """
    partial = directory / f"{name}.part"
    try:
        partial.unlink(missing_ok=True)
        partial.touch()  # with the modes that the user's umask gives: safetensors gives 0600
        mode = partial.stat().st_mode
        save_file(tensors, partial, metadata={"format": "pt"})
        partial.chmod(mode)
        with partial.open("rb+") as stream:
            os.fsync(stream.fileno())
        sums = FileSums(sha256_of(partial), {n: _crc32_of(t) for n, t in tensors.items()})
        partial.replace(directory / name)
    except SafetensorError as error:  # wraps what the system said
        partial.unlink(missing_ok=True)
        raise OSError(str(error)) from error
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    return sums


def write_index(
    directory: Path, files: Mapping[str, Mapping[str, int]], sums: Mapping[str, FileSums]
) -> None:
    """Write the index: `files` has each file's tensors with their bytes, `sums` those of each."""
    weight_map = {tensor: file for file, tensors in files.items() for tensor in tensors}
    total = sum(size for tensors in files.values() for size in tensors.values())
    metadata = {
        "total_size": total,
        CHECKSUMS_KEY: {file: sums[file].sha256 for file in files},
        TENSOR_SUMS_KEY: {name: crc for file in files for name, crc in sums[file].crc32.items()},
    }
    text = json.dumps({"metadata": metadata, "weight_map": weight_map}, indent=1) + "\n"
    (directory / INDEX_FILE).write_text(text, encoding="utf-8")


def sha256_of(file: Path, on_bytes: Callable[[int], None] | None = None) -> str:
    """Return a file's SHA-256 in hex; `on_bytes` gets how many were read."""
    digest = hashlib.sha256()
    with file.open("rb") as stream:
        while chunk := stream.read(_CHUNK_BYTES):
            digest.update(chunk)
            if on_bytes is not None:
                on_bytes(len(chunk))
    return digest.hexdigest()


def require_checksums(directory: Path, on_bytes: Callable[[int], None] | None = None) -> int:
    """Read all files of a packed checkpoint; return how many have the checksum of the index.

    Raises `ModelError` naming the first one that has another or none, and its first damaged tensor;
    0 for a checkpoint without checksums.
    """
    index = read_json(directory, INDEX_FILE)
    metadata = index.get("metadata")
    if not isinstance(metadata, dict) or not (checksums := metadata.get(CHECKSUMS_KEY)):
        return 0
    names = dict.fromkeys(index["weight_map"].values())
    for name in names:
        expected = checksums.get(name) if isinstance(checksums, dict) else None
        if not isinstance(expected, str):
            raise ModelError(
                f"{directory / INDEX_FILE} has no SHA-256 of {name}, but of other files; copy the "
                "index again, or pack the model again"
            )
        found = sha256_of(directory / name, on_bytes)
        if found != expected:
            damage = _damage(directory / name, metadata.get(TENSOR_SUMS_KEY))
            raise ModelError(
                f"{directory / name} has the SHA-256 {found[:16]}..., expected {expected[:16]}..., "
                f"{damage}; the disk or a copy has damaged it: pack the model again or copy the "
                "file again"
            )
    return len(names)


def _damage(file: Path, sums: object) -> str:
    """Say which tensor of a damaged file has other bytes than were written: the first one."""
    if not isinstance(sums, dict):  # packed by an older version
        return "in one of its tensors or its header"
    with contextlib.suppress(SafetensorError), safe_open(file, "pt") as opened:
        for name in opened.keys():  # noqa: SIM118
            if sums.get(name) != _crc32_of(opened.get_tensor(name)):
                return f"and tensor {name} other bytes than were written"
    return "in its header"


def _crc32_of(tensor: Tensor) -> int:
    return zlib.crc32(tensor.detach().cpu().reshape(-1).view(torch.uint8).numpy().data)
