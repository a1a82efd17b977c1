"""The index of a packed checkpoint, and its files checked against it.

It has the SHA-256 of each file; the CRC-32 of each tensor, which says where damage is; and the
CRC32C of each expert, against which one is checked that is read by itself.
"""

import contextlib
import hashlib
import json
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from tandem.checkpoint.file_writer import FileSums
from tandem.checkpoint.json_files import JsonObject, read_json
from tandem.checkpoint.packed import CHECKSUMS_KEY, EXPERT_SUMS_KEY, INDEX_FILE, TENSOR_SUMS_KEY
from tandem.core.errors import ModelError
from tandem.kernels import _native

_CHUNK_BYTES = 1 << 24


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
        EXPERT_SUMS_KEY: {n: c for file in files for n, c in sums[file].expert_crc32c.items()},
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
            damage = _damage(directory / name, metadata)
            raise ModelError(
                f"{directory / name} has the SHA-256 {found[:16]}..., expected {expected[:16]}..., "
                f"{damage}; the disk or a copy has damaged it: pack the model again or copy the "
                "file again"
            )
    return len(names)


def _damage(file: Path, metadata: JsonObject) -> str:
    """Say which tensor of a damaged file, and which expert, has other bytes than were written."""
    sums, expert_sums = metadata.get(TENSOR_SUMS_KEY), metadata.get(EXPERT_SUMS_KEY)
    if not isinstance(sums, dict):  # packed by an older version
        return "in one of its tensors or its header"
    with contextlib.suppress(SafetensorError), safe_open(file, "pt") as opened:
        for name in opened.keys():  # noqa: SIM118
            tensor = opened.get_tensor(name)
            if sums.get(name) != _crc32_of(tensor):
                of_experts = expert_sums.get(name) if isinstance(expert_sums, dict) else None
                where = _damaged_expert(tensor, of_experts)
                return f"and tensor {name} other bytes than were written{where}"
    return "in its header"


def _damaged_expert(tensor: Tensor, sums: object) -> str:
    """Name the first expert that has another sum; nothing where none are known."""
    if isinstance(sums, list) and tensor.dim() == 2 and len(sums) == len(tensor):
        for expert, (row, expected) in enumerate(zip(tensor, sums, strict=True)):
            if _native.crc32c(row, 0) != expected:
                return f", of expert {expert} first"
    return ""


def _crc32_of(tensor: Tensor) -> int:
    return zlib.crc32(tensor.reshape(-1).view(torch.uint8).numpy().data)
