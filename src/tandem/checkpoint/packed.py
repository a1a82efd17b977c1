"""Packed checkpoints: file and tensor names that only Tandem resolves.

Under the usual names, Transformers without Tandem would open a packed checkpoint and run random
experts. Under Tandem's names it reports that it finds no weights. This module does not import
torch.
"""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

from tandem.core.errors import ModelError

INDEX_FILE = "tandem.safetensors.index.json"
DENSE_FILE = "tandem-dense.safetensors"
CHECKSUMS_KEY = "sha256"  # in the index's metadata: file -> checksum
TENSOR_SUMS_KEY = "crc32"  # likewise: tensor -> checksum
EXPERT_SUMS_KEY = "expert_crc32c"  # likewise: tensor of experts -> checksums
_PREFIX = "tandem_"  # a suffix would not do: "gate_up_proj_..." contains "up_proj_..."


def experts_file(layer: int) -> str:
    """Return the name of the file with the experts of one MoE layer."""
    return f"tandem-experts-{layer:05d}.safetensors"


def is_experts_file(file: Path) -> bool:
    """Whether a file of a packed checkpoint holds experts."""
    return file.name.startswith("tandem-experts-")


def rows_file(number: int) -> str:
    """Return the name of the file with one table of rows."""
    return f"tandem-rows-{number:05d}.safetensors"


def is_dense_file(file: Path) -> bool:
    """Whether a file of a packed checkpoint holds neither experts nor a table of rows."""
    return not file.name.startswith(("tandem-experts-", "tandem-rows-"))


def packed_name(tensor_name: str) -> str:
    """Return the last part of an expert tensor's name in a packed checkpoint."""
    return _PREFIX + tensor_name


def require_new(target: Path) -> None:
    """Raise `ModelError` unless the directory is empty or does not exist."""
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ModelError(f"{target} exists and is not an empty directory; name a new one")


@contextlib.contextmanager
def alone(file: Path) -> Iterator[bool]:
    """Lock a file for the `with` body; yield True, or False if another process holds the lock."""
    lock = os.open(file, os.O_CREAT | os.O_RDWR)
    try:
        if fcntl is not None:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                yield False
                return
        yield True
    finally:
        os.close(lock)
