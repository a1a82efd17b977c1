"""Packed copies of models that had to be converted, kept for the next start within a size limit.

A copy is a packed checkpoint, a directory named after its source and a hash of everything that the
copy depends on (`Origin`). The note `NAME.json` beside the directory describes the copy; the note's
modification time is the copy's last use. A writer takes the lock of the name, removes the least
recently used copies until there is room, writes into a hidden directory, renames it, and writes the
note last. A reader takes no lock: a copy is valid only with its note and as many bytes as the note
says.
"""

import contextlib
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from tandem.checkpoint.packed import INDEX_FILE, alone
from tandem.core.errors import ModelError
from tandem.core.units import format_bytes

# This share of the disk stays free, whatever is kept: a full disk breaks more than a slow start.
_LEFT_FREE = 1 / 20
_SAMPLE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Origin:
    """What a copy was made from: the source's files, the options, and Tandem's version."""

    source: str
    options: Mapping[str, str]
    fingerprint: str

    @classmethod
    def of(
        cls, source: str, files: Sequence[Path], options: Mapping[str, str], version: str
    ) -> "Origin":
        """Return the origin of a copy of `files`.

        The fingerprint covers options, version, and each file's name, size, time, and first and
        last MiB.
        """
        digest = hashlib.sha256(json.dumps([version, sorted(options.items())]).encode())
        for file in sorted(files):
            status = file.stat()
            digest.update(f"{file.name} {status.st_size} {status.st_mtime_ns}\n".encode())
            with file.open("rb") as stream:
                digest.update(stream.read(_SAMPLE_BYTES))
                stream.seek(max(0, status.st_size - _SAMPLE_BYTES))
                digest.update(stream.read(_SAMPLE_BYTES))
        return cls(source, dict(options), digest.hexdigest())

    @property
    def name(self) -> str:
        """The copy's name: a readable part, then a hash."""
        return f"{Path(self.source).name.lstrip('.')}-{self.fingerprint[:12]}"


@dataclass(frozen=True, slots=True)
class KeptCopy:
    """A kept copy on the disk."""

    name: str
    directory: Path
    source: str
    options: Mapping[str, str]
    num_bytes: int
    last_used: float
    """Seconds since the epoch."""


class KeptCopies:
    """The packed copies in one directory, which together take at most `limit_bytes`."""

    def __init__(self, directory: Path, limit_bytes: int) -> None:
        """Use `directory`, which need not exist."""
        self.directory = directory
        self._limit = limit_bytes

    def all(self) -> list[KeptCopy]:
        """Return all copies, the most recently used first."""
        found = [copy for file in self.directory.glob("*.json") if (copy := _read(file))]
        return sorted(found, key=lambda copy: copy.last_used, reverse=True)

    def find(self, origin: Origin) -> Path | None:
        """Return the directory of the copy with this origin; None if it is missing or incomplete.

        Updates the copy's time of use; removes an incomplete copy.
        """
        note = self._note(origin.name)
        copy = _read(note)
        if copy is None:
            return None
        if _weight_bytes(copy.directory) != copy.num_bytes:
            with contextlib.suppress(ModelError):
                self.remove(copy.name)
            return None
        with contextlib.suppress(OSError):  # a cache that cannot be written may still be readable
            os.utime(note)
        return copy.directory

    def remove(self, name: str) -> None:
        """Delete a copy; raises `ModelError` if the system refuses."""
        directory = self.directory / name
        try:
            self._note(name).unlink(missing_ok=True)  # without its note a copy does not exist
            shutil.rmtree(directory)
        except FileNotFoundError:
            pass
        except OSError as error:
            raise ModelError(
                f"cannot remove {directory}: {error.strerror}; delete it yourself"
            ) from error

    def write(self, origin: Origin, num_bytes: int, save: Callable[[Path], object]) -> Path | None:
        """Let `save` write a copy of about `num_bytes`, and return the copy's directory.

        Returns None if another process is writing this copy. Raises `ModelError` if there is no
        room for it or the system refuses.
        """
        with self._reported_errors(), self._alone(origin.name) as is_alone:
            return self._write(origin, num_bytes, save) if is_alone else None

    def require_room(self, name: str, num_bytes: int) -> None:
        """Raise `ModelError` if there is no room for a copy of `num_bytes`, as `write` would."""
        with self._reported_errors(), self._alone(name):
            self._removable(num_bytes, keep=name)

    @contextlib.contextmanager
    def _reported_errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise ModelError(
                f"no packed copy is kept: {self.directory}: {error.strerror or error}; make "
                "room, or set TANDEM_CACHE to a directory that can be written"
            ) from error

    def _write(self, origin: Origin, num_bytes: int, save: Callable[[Path], object]) -> Path:
        self._sweep()
        self._make_room(num_bytes, keep=origin.name)
        target = self.directory / origin.name
        shutil.rmtree(target, ignore_errors=True)  # a copy whose note was never written
        save(target)
        note = asdict(origin) | {"bytes": _weight_bytes(target)}
        partial = self._note(origin.name).with_suffix(".part")
        try:
            partial.write_text(json.dumps(note, indent=1) + "\n", encoding="utf-8")
            partial.replace(self._note(origin.name))
        except OSError:
            partial.unlink(missing_ok=True)
            shutil.rmtree(target, ignore_errors=True)
            raise
        return target

    def _sweep(self) -> None:
        """Delete what killed writers left: partial directories, and directories without a note."""
        for left in [file for file in self.directory.iterdir() if file.is_dir()]:
            name = left.name.removeprefix(".").removesuffix(".partial")
            with self._alone(name) as is_alone:
                if is_alone and (left.name != name or not self._note(name).exists()):
                    shutil.rmtree(left, ignore_errors=True)

    def _make_room(self, num_bytes: int, *, keep: str) -> None:
        """Remove the least recently used copies except `keep` until `num_bytes` have room.

        Raises `ModelError` if removing all of them would not be enough.
        """
        for copy in self._removable(num_bytes, keep=keep):
            self.remove(copy.name)

    def _removable(self, num_bytes: int, *, keep: str) -> list[KeptCopy]:
        """Return the copies to remove to make room for `num_bytes`.

        Raises `ModelError` if removing all copies but `keep` would not be enough.
        """
        disk = shutil.disk_usage(self.directory)
        others = [copy for copy in self.all() if copy.name != keep]
        taken = sum(copy.num_bytes for copy in others)
        free = int(disk.free - disk.total * _LEFT_FREE)
        if num_bytes > min(self._limit, free + taken):
            raise ModelError(
                f"no packed copy is kept: it takes {format_bytes(num_bytes)}, the limit is "
                f"{format_bytes(self._limit)} and {format_bytes(disk.free)} of the disk are "
                "free; raise --keep-limit or set TANDEM_CACHE to another disk"
            )
        leaving: list[KeptCopy] = []
        while taken + num_bytes > self._limit or num_bytes > free:
            leaving.append(oldest := others.pop())
            taken, free = taken - oldest.num_bytes, free + oldest.num_bytes
        return leaving

    def _alone(self, name: str) -> contextlib.AbstractContextManager[bool]:
        """Return a context that takes a name's lock; it yields False if another process has it."""
        self.directory.mkdir(parents=True, exist_ok=True)
        return alone(self.directory / f".{name}.lock")

    def _note(self, name: str) -> Path:
        return self.directory / f"{name}.json"


def _read(note: Path) -> KeptCopy | None:
    """Return the copy that a note describes; None if the note or the copy cannot be read."""
    try:
        stored = json.loads(note.read_text(encoding="utf-8"))
        directory = note.with_suffix("")
        if not (directory / INDEX_FILE).is_file():
            return None
        return KeptCopy(
            note.stem, directory, str(stored["source"]), dict(stored["options"]),
            int(stored["bytes"]), note.stat().st_mtime,
        )  # fmt: skip
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _weight_bytes(directory: Path) -> int:
    return sum(file.stat().st_size for file in directory.glob("*.safetensors"))
