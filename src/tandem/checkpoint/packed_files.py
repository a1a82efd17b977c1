"""Writes and checks the files of packed checkpoints: whole or not there, each with its checksum."""

import hashlib
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from tandem.checkpoint.json_files import read_json
from tandem.checkpoint.packed import CHECKSUMS_KEY, INDEX_FILE
from tandem.core.errors import ModelError

_CHUNK_BYTES = 1 << 24


def write_tensors(directory: Path, name: str, tensors: dict[str, Tensor]) -> str:
    """Write a safetensors file, which appears when it is on the disk; return its SHA-256.

    Raises `OSError`, and leaves no part of the file.
    """
    partial = directory / f"{name}.part"
    try:
        save_file(tensors, partial, metadata={"format": "pt"})
        with partial.open("rb+") as stream:
            os.fsync(stream.fileno())
        checksum = sha256_of(partial)
        partial.replace(directory / name)
    except SafetensorError as error:  # wraps what the system said
        partial.unlink(missing_ok=True)
        raise OSError(str(error)) from error
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    return checksum


def write_index(
    directory: Path, files: Mapping[str, Mapping[str, int]], checksums: Mapping[str, str]
) -> None:
    """Write the index: `files` has each file's tensors with their bytes."""
    weight_map = {tensor: file for file, tensors in files.items() for tensor in tensors}
    total = sum(size for tensors in files.values() for size in tensors.values())
    metadata = {"total_size": total, CHECKSUMS_KEY: dict(checksums)}
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

    Raises `ModelError` naming the first one that has another; 0 for a checkpoint without checksums.
    """
    metadata = read_json(directory, INDEX_FILE).get("metadata") or {}
    checksums: dict[str, str] = metadata.get(CHECKSUMS_KEY) or {}
    for name, expected in checksums.items():
        found = sha256_of(directory / name, on_bytes)
        if found != expected:
            raise ModelError(
                f"{directory / name} has the SHA-256 {found[:16]}..., expected {expected[:16]}...; "
                "the disk or a copy has damaged it: pack the model again or copy the file again"
            )
    return len(checksums)
