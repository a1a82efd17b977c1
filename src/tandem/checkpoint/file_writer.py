"""Writes a packed checkpoint's safetensors file atomically, in one pass, with checksums.

The data and every expert begin at a multiple of 4,096 bytes (the format allows spaces after the
header), so that experts can be read without the system's page cache.
"""

import hashlib
import json
import math
import os
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tandem.kernels import _native
from tandem.kernels.formats.weight_format import FILE_ALIGNMENT_BYTES, aligned

_CHUNK_BYTES = 1 << 20  # small enough that the second checksum reads it from the CPU's cache
_LENGTH_BYTES = 8
_DTYPES = {
    torch.bool: "BOOL", torch.uint8: "U8", torch.int8: "I8", torch.int16: "I16",
    torch.uint16: "U16", torch.int32: "I32", torch.uint32: "U32", torch.int64: "I64",
    torch.uint64: "U64", torch.float16: "F16", torch.bfloat16: "BF16", torch.float32: "F32",
    torch.float64: "F64", torch.complex64: "C64", torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2", torch.float8_e8m0fnu: "F8_E8M0",
    torch.float8_e4m3fnuz: "F8_E4M3FNUZ", torch.float8_e5m2fnuz: "F8_E5M2FNUZ",
}  # fmt: skip

_Bytes = npt.NDArray[np.uint8]
Parts = Tensor | Sequence[Tensor]
"""A tensor, or its parts along the first dimension."""


class FileSums(NamedTuple):
    """The checksums of a file: SHA-256 in hex, CRC-32 of each tensor, CRC32C of each expert.

    An expert's checksum covers all bytes up to the start of the next expert.
    """

    sha256: str
    crc32: dict[str, int]
    expert_crc32c: dict[str, list[int]]


def write_tensors(
    directory: Path, name: str, tensors: Mapping[str, Parts], *, experts: str | None = None
) -> FileSums:
    """Write a safetensors file atomically; return its checksums.

    The tensor named `experts`, (num_experts, bytes), comes first; each expert is padded with zeros
    to a multiple of 4,096 bytes. Raises `OSError`; no partial file is left.
    """
    partial = directory / f"{name}.part"
    try:
        partial.unlink(missing_ok=True)
        with partial.open("xb") as stream:
            sums = _write(stream, _in_order(tensors, experts), experts)
            stream.flush()
            os.fsync(stream.fileno())
        partial.replace(directory / name)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    return sums


def _in_order(tensors: Mapping[str, Parts], experts: str | None) -> dict[str, Sequence[Tensor]]:
    """Return each tensor's parts: those of `experts` first, then by element size, large to small.

    In this order each tensor begins at a multiple of its element size.
    """
    parts = {n: [found] if isinstance(found, Tensor) else found for n, found in tensors.items()}
    names = sorted(parts, key=lambda n: (n != experts, -parts[n][0].itemsize, n))
    return {name: parts[name] for name in names}


def _write(
    stream: BinaryIO, tensors: Mapping[str, Sequence[Tensor]], experts: str | None
) -> FileSums:
    sha256, sums = hashlib.sha256(), FileSums("", {}, {})

    def put(pieces: Iterable[_Bytes]) -> int:
        crc32 = 0
        for piece in pieces:
            sha256.update(piece.data)
            crc32 = zlib.crc32(piece.data, crc32)
            stream.write(piece.data)
        return crc32

    put([_header(tensors, experts)])
    for name, parts in tensors.items():
        if name == experts:
            of_experts = sums.expert_crc32c[name] = []
            sums.crc32[name] = put(_experts(parts[0], of_experts))
        else:
            sums.crc32[name] = put(chunk for part in parts for chunk in _chunks(part))
    return sums._replace(sha256=sha256.hexdigest())


def _experts(tensor: Tensor, sums: list[int]) -> Iterator[_Bytes]:
    """Yield each expert's bytes, then its padding; append the CRC32C of the two to `sums`."""
    filling = np.zeros(_row_bytes(tensor) - tensor.shape[1], np.uint8)
    for row in _bytes_of(tensor).reshape(tensor.shape):
        sums.append(_native.crc32c(filling, _native.crc32c(row, 0)))
        yield row
        yield filling


def _chunks(tensor: Tensor) -> Iterator[_Bytes]:
    content = _bytes_of(tensor)
    for begin in range(0, len(content), _CHUNK_BYTES):
        yield content[begin : begin + _CHUNK_BYTES]


def _header(tensors: Mapping[str, Sequence[Tensor]], experts: str | None) -> _Bytes:
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, (tensor, *others) in tensors.items():
        shape = [len(tensor), _row_bytes(tensor)] if name == experts else list(tensor.shape)
        if others:
            shape[0] += sum(map(len, others))
        begin, end = end, end + math.prod(shape) * tensor.itemsize
        dtype = _DTYPES[tensor.dtype]
        entries[name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(entries, separators=(",", ":")).encode()
    length = aligned(_LENGTH_BYTES + len(text), FILE_ALIGNMENT_BYTES) - _LENGTH_BYTES
    whole = length.to_bytes(_LENGTH_BYTES, "little") + text.ljust(length)
    return np.frombuffer(whole, np.uint8)


def _row_bytes(experts: Tensor) -> int:
    """Return the number of bytes that one expert takes in the file, with its padding."""
    return aligned(experts.shape[1], FILE_ALIGNMENT_BYTES)


def _bytes_of(tensor: Tensor) -> _Bytes:
    content: _Bytes = tensor.detach().cpu().reshape(-1).view(torch.uint8).numpy()
    return content
