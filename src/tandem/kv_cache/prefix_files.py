"""Keys and values of prompts' prefixes on disk: one file per segment of tokens, named by its key.

A segment's key is a hash of all tokens up to its end, and of the model and the options that
computed the segment. The files therefore form a tree of prefixes without an index. A file is
written under a temporary name and then renamed, so it is complete or absent. A checksum is verified
when a file is read, and a damaged file is removed. Other processes may share the directory. Prompts
can be reconstructed from keys and values, so files and directories are readable by their user only,
whatever the umask.

One thread offers and reads segments, another writes them. An offered segment is in `_held` until
its file exists, and until then it is read from `_held`. `_index` must change only under `_lock`.
"""

import contextlib
import hashlib
import logging
import os
import queue
import stat
import struct
import threading
import zlib
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path

from tandem.core.errors import ConfigError

_log = logging.getLogger("tandem.kv_cache")

SEGMENT_TOKENS = 256
# States are stored every so many segments, because they may be larger than segments.
SEGMENTS_BETWEEN_STATES = 2
_MAGIC = b"TANDEMKV"
_HEADER = struct.Struct("<8sQI")  # magic, number of bytes that follow, their CRC-32
_SUFFIX = ".kv"
_FILE_MODE, _DIRECTORY_MODE = 0o600, 0o700
# Segments in memory that wait for being written.
_MOST_HELD = 4


class PrefixFiles:
    """The segments of one model with its present options, in a directory with a size limit."""

    def __init__(self, directory: Path, limit_bytes: int, fingerprint: bytes) -> None:
        """Create the directory if needed, find earlier processes' files, and start the writer.

        `fingerprint` identifies the model, its options and the version of Tandem. Files with other
        fingerprints count towards the limit too.
        """
        self._root = directory
        self._first_key = hashlib.blake2b(fingerprint, digest_size=16).digest()
        self._directory = directory / self._first_key.hex()
        self._limit = limit_bytes
        self._lock = threading.Lock()
        self._index: OrderedDict[Path, int] = OrderedDict()  # bytes, least recently used first
        self._held: dict[bytes, memoryview] = {}
        self._waiting: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._is_full = False
        directory.parent.mkdir(parents=True, exist_ok=True)
        for own in (directory, self._directory):
            _make_private(own)
        self._find()
        self._make_room(0)
        self._writer = threading.Thread(target=self._write_all, daemon=True)
        self._writer.start()

    @property
    def num_bytes(self) -> int:
        """Bytes of all files, those of other models included."""
        with self._lock:
            return sum(self._index.values())

    def keys(
        self, tokens: Sequence[int], known: Sequence[bytes] = (), *, owner: bytes = b""
    ) -> list[bytes]:
        """Return one key for each whole segment of a prompt's `tokens`.

        `known` are the keys of the first segments, if they were computed before. Keys differ for
        each `owner`, who is identified by at most 64 bytes.
        """
        found = list(known)
        first_key = self._first_key
        if owner:
            first_key = hashlib.blake2b(first_key, digest_size=16, key=owner).digest()
        previous = found[-1] if found else first_key
        for first in range(len(found) * SEGMENT_TOKENS, len(tokens) - SEGMENT_TOKENS + 1,
                           SEGMENT_TOKENS):  # fmt: skip
            segment = tokens[first : first + SEGMENT_TOKENS]
            digest = hashlib.blake2b(previous, digest_size=16)
            digest.update(struct.pack(f"<{SEGMENT_TOKENS}q", *segment))
            previous = digest.digest()
            found.append(previous)
        return found

    def states_key(self, key: bytes) -> bytes:
        """Return the key under which a model's states at the end of a segment are kept."""
        return hashlib.blake2b(key, digest_size=16, person=b"states").digest()

    def has(self, key: bytes) -> bool:
        """Tell whether a segment exists, as far as this process knows."""
        with self._lock:
            return key in self._held or self._path(key) in self._index

    @property
    def takes_more(self) -> bool:
        """Whether a segment may be offered now."""
        return len(self._held) < _MOST_HELD and not self._is_full

    def offer(self, key: bytes, data: memoryview) -> None:
        """Queue a segment for writing; `data` must not change any more."""
        with self._lock:
            self._held[key] = data
        self._waiting.put(key)

    def read(self, key: bytes) -> memoryview | None:
        """Return a segment, and count this as its latest use; None if it is missing or damaged."""
        with self._lock:
            if (held := self._held.get(key)) is not None:
                return held
        path = self._path(key)
        try:
            data = bytearray(path.stat().st_size)
            with path.open("rb", buffering=0) as file:
                num_read = file.readinto(data)
        except OSError:
            self._forget(path)
            return None
        body = memoryview(data)[_HEADER.size :]
        is_whole = num_read == len(data) > _HEADER.size
        if not is_whole or _HEADER.unpack_from(data) != _header(body):
            _log.warning("a damaged file of keys and values was removed: %s", path.name)
            self._remove(path)
            return None
        with self._lock:
            if path in self._index:
                self._index.move_to_end(path)
        with contextlib.suppress(OSError):
            os.utime(path)
        return body

    def close(self, seconds: float) -> None:
        """Let the writer end after the segments offered so far; wait at most `seconds` for that."""
        self._waiting.put(None)
        self._writer.join(seconds)

    def _path(self, key: bytes) -> Path:
        return self._directory / (key.hex() + _SUFFIX)

    def _find(self) -> None:
        found = []
        for path in self._root.glob(f"*/*{_SUFFIX}"):
            with contextlib.suppress(OSError):
                status = path.stat()
                if stat.S_IMODE(status.st_mode) != _FILE_MODE:
                    path.chmod(_FILE_MODE)
                found.append((status.st_mtime, path, status.st_size))
        self._index.update((path, size) for _, path, size in sorted(found))

    # ---- the writer ------------------------------------------------------------------------------

    def _write_all(self) -> None:
        while (key := self._waiting.get()) is not None:
            with self._lock:
                data = self._held[key]
            self._write(self._path(key), data)
            with self._lock:
                del self._held[key]

    def _write(self, path: Path, data: memoryview) -> None:
        size = _HEADER.size + len(data)
        if size > self._limit:
            return
        self._make_room(size)
        part_file = path.with_suffix(f".{os.getpid()}.part")
        try:
            with open(part_file, "wb", opener=_open_private) as file:
                file.write(_HEADER.pack(*_header(data)))
                file.write(data)
            part_file.replace(path)
        except OSError as error:
            with contextlib.suppress(OSError):
                part_file.unlink()
            if not self._is_full:
                _log.warning("keys and values are no longer written to disk: %s", error.strerror)
            self._is_full = True
            return
        with self._lock:
            self._index[path] = size

    def _make_room(self, size: int) -> None:
        """Remove the least recently used files until there is room for `size` bytes."""
        while (total := self.num_bytes) and total + size > self._limit:
            with self._lock:
                path = next(iter(self._index))
            self._remove(path)

    def _remove(self, path: Path) -> None:
        with contextlib.suppress(OSError):
            path.unlink()
        self._forget(path)

    def _forget(self, path: Path) -> None:
        with self._lock:
            self._index.pop(path, None)


def _make_private(directory: Path) -> None:
    """Create a directory that only its user can read, or give an existing one this mode.

    Raises `ConfigError` if that fails.
    """
    try:
        directory.mkdir(mode=_DIRECTORY_MODE, exist_ok=True)
        if stat.S_IMODE(directory.stat().st_mode) != _DIRECTORY_MODE:
            directory.chmod(_DIRECTORY_MODE)
    except OSError as error:
        raise ConfigError(
            f"keys and values cannot be kept in {directory}, which must be this user's alone "
            f"({error.strerror}); make it so, set TANDEM_CACHE, or leave --kv-disk out"
        ) from error


def _open_private(path: str, flags: int) -> int:
    """Create a file that only its user can read, replacing an existing one; return a descriptor."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)  # left by an earlier process with the same number
    descriptor = os.open(path, flags | os.O_EXCL | os.O_NOFOLLOW, _FILE_MODE)
    os.fchmod(descriptor, _FILE_MODE)
    return descriptor


def _header(body: memoryview) -> tuple[bytes, int, int]:
    return _MAGIC, len(body), zlib.crc32(body)
