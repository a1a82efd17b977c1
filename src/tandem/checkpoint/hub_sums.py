"""Writes a directory's `SHA256SUMS` for a hub, and verifies downloads against it.

The file has the format of `sha256sum`. After a verification, `.tandem-checked` records the files'
sizes and times, so that an unchanged download is not read again.
"""

import contextlib
import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatch
from pathlib import Path, PurePosixPath

from tandem.checkpoint.packed import INDEX_FILE
from tandem.core.errors import ModelError

SUMS_FILE = "SHA256SUMS"
_CHECKED_FILE = ".tandem-checked"
_LINE = re.compile(r"(?P<sum>[0-9a-f]{64}) [ *](?P<name>.+)")
_MOST_BYTES = 1 << 20
_SHOWN_FILES = 3


def write_sums(directory: Path) -> Path:
    """Write `SHA256SUMS` for all files in a directory that are not hidden; return its path.

    The file is replaced atomically.
    """
    files = sorted(
        file
        for file in directory.rglob("*")
        if file.is_file() and not file.name.startswith(".") and file.name != SUMS_FILE
    )
    lines = [f"{_sum_of(file)}  {file.relative_to(directory).as_posix()}\n" for file in files]
    written = directory / f".{SUMS_FILE}"
    written.write_text("".join(lines), encoding="utf-8")
    return written.replace(directory / SUMS_FILE)


def require_as_published(directory: Path, name: str, patterns: Sequence[str]) -> None:
    """Raise `ModelError` if a downloaded packed model differs from its `SHA256SUMS`.

    Only listed files that match one of `patterns` are checked. Damaged files and the list are
    removed, so that the next download fetches them again. Nothing is checked if the directory has
    no `SHA256SUMS`, or if it does not list the index of a packed checkpoint.
    """
    if not (directory / SUMS_FILE).is_file():
        return
    sums = {
        file: sha
        for file, sha in _read_sums(directory, name).items()
        if any(fnmatch(file, pattern) for pattern in patterns)
    }
    if INDEX_FILE not in sums:
        return  # another program wrote this list
    missing = [file for file in sums if not (directory / file).is_file()]
    if missing:
        raise ModelError(
            f"{name} lacks {_shown(missing)}, which its {SUMS_FILE} names: run the same command "
            "again, and if that does not help, tell the publisher"
        )
    mark, state = directory / _CHECKED_FILE, _state(directory, sums)
    if mark.is_file() and mark.read_text(encoding="utf-8", errors="replace") == state:
        return
    damaged = [file for file, sha in sums.items() if _sum_of(directory / file) != sha]
    if damaged:
        for file in [*damaged, SUMS_FILE]:  # the list of checksums may itself be damaged
            _remove(directory / file)
        raise ModelError(
            f"{name} was downloaded, but {_shown(damaged)} does not match its {SUMS_FILE} and was "
            "removed: run the same command again to download it, and if that does not help, tell "
            "the publisher"
        )
    with contextlib.suppress(OSError):  # if this fails, files are compared each time
        mark.write_text(state, encoding="utf-8")


def _read_sums(directory: Path, name: str) -> dict[str, str]:
    """Return the listed SHA-256 of each file, by name; `ModelError` if the list is damaged.

    A path that leads out of `directory` counts as damage.
    """
    file = directory / SUMS_FILE
    try:
        if file.stat().st_size > _MOST_BYTES:
            raise ValueError
        return dict(_entries(file.read_text(encoding="utf-8")))
    except ValueError:  # not even text
        raise ModelError(
            f"{name} has a damaged {SUMS_FILE}: its lines are not a sum and a file's name; run the "
            "same command with another --revision, or tell who published it"
        ) from None


def _entries(text: str) -> Iterator[tuple[str, str]]:
    """Yield each line's file name and checksum; `ValueError` for a bad line or an unsafe path."""
    for line in text.splitlines():
        found = _LINE.fullmatch(line)
        path = PurePosixPath(found["name"]) if found else None
        if found is None or path is None or path.is_absolute() or ".." in path.parts:
            raise ValueError(line)
        yield found["name"], found["sum"]


def _state(directory: Path, sums: Mapping[str, str]) -> str:
    """Return a text that identifies the files' versions: expected checksums, sizes and times."""
    stats = {name: (directory / name).stat() for name in sums}
    lines = [f"{sums[name]} {x.st_size} {x.st_mtime_ns} {name}\n" for name, x in stats.items()]
    return "".join(lines)


def _remove(file: Path) -> None:
    """Remove a downloaded file, and in the hub's cache also the blob that it links to."""
    stored = file.resolve()
    file.unlink()
    if file.parent not in stored.parents:
        stored.unlink(missing_ok=True)


def _sum_of(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _shown(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN_FILES} more files" if len(names) > _SHOWN_FILES else ""
    return ", ".join(names[:_SHOWN_FILES]) + more
