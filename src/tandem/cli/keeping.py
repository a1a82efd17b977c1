"""Where Tandem keeps packed copies of models that had to be converted.

A copy is written while the model answers. On a terminal the user is asked once whether to keep
copies.
"""

import contextlib
import os
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from tandem.cli.progress import PackingBar
from tandem.core.config import option
from tandem.core.errors import ModelError, TandemError
from tandem.core.units import format_bytes, parse_bytes

if TYPE_CHECKING:
    from tandem.cli.kept_copies import KeptCopies, Origin
    from tandem.foreign_types import PreTrainedModel
    from tandem.hf.packed_writer import OnProgress

# If loading takes less, a copy is not worth a question or space on the disk.
_SLOW_SECONDS = 10.0
# Rate at which two cores pack bf16 weights or a GGUF file, for the estimate before packing starts.
_PACKED_BYTES_PER_SECOND = 300e6


@dataclass(frozen=True, slots=True, kw_only=True)
class KeepOptions:
    """The user's options about packed copies."""

    rare: ClassVar[tuple[str, ...]] = ("keep_limit",)
    keep: bool | None = option(
        None,
        help="write a packed copy of a model that had to be converted, which the next start maps "
        "(default: asked once on a terminal)",
    )
    pack_to_disk: bool | None = option(
        None,
        help="write a packed copy of a model that does not fit into memory, and run it from the "
        "disk (default: asked on a terminal)",
    )
    keep_limit: str = option(
        "100GiB",
        help="all packed copies take at most this; the least recently used go first",
        metavar="SIZE",
    )

    def __post_init__(self) -> None:
        """Check the limit."""
        parse_bytes(self.keep_limit, name="--keep-limit")


def cache_dir() -> Path:
    """Return $TANDEM_CACHE, or `tandem` in the user's cache directory."""
    if chosen := os.environ.get("TANDEM_CACHE"):
        return Path(chosen).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "tandem"


def kept_copies(options: KeepOptions | None = None) -> "KeptCopies":
    """Return the packed copies on this machine."""
    from tandem.cli.kept_copies import KeptCopies

    limit = (options or KeepOptions()).keep_limit
    return KeptCopies(cache_dir() / "packed", parse_bytes(limit, name="--keep-limit"))


class Keeper:
    """Finds or writes the packed copy of one model."""

    def __init__(self, options: KeepOptions, *, quiet: bool, may_ask: bool = True) -> None:
        """With `quiet`, print and ask nothing; without `may_ask`, ask nothing."""
        self._options = options
        self._quiet = quiet
        self._may_ask = may_ask and not quiet
        self._thread: threading.Thread | None = None
        self._is_leaving = False
        self._done_bytes = self._total_bytes = 0
        self._failure: TandemError | None = None

    def origin(self, source: str, files: list[Path], options: dict[str, str]) -> "Origin":
        """Return the origin of a copy made from this source with these options."""
        from tandem.cli.kept_copies import Origin

        return Origin.of(source, files, options, version("tandem-moe"))

    def find(self, origin: "Origin") -> Path | None:
        """Return the directory of the copy with this origin; None if it is missing or damaged.

        A damaged copy is removed.
        """
        from tandem.hf.checkpoint import open_model

        copies = kept_copies(self._options)
        directory = copies.find(origin)
        if directory is None:
            return None
        try:
            open_model(directory)  # reads the headers
        except TandemError as error:
            if not self._quiet:
                print(
                    f"[the packed copy is damaged and is written again: {error}]", file=sys.stderr
                )
            with contextlib.suppress(TandemError):  # the cache cannot be written
                copies.remove(origin.name)
            return None
        return directory

    def look_ahead(self, origin: "Origin", num_bytes: Callable[[], int]) -> None:
        """If the user wants a copy, check for room before loading; without room, keep none.

        Prints the reason unless `quiet`. `num_bytes` returns the copy's size.
        """
        if not self._options.keep:
            return
        try:
            kept_copies(self._options).require_room(origin.name, num_bytes())
        except TandemError as error:
            if not self._quiet:
                print(f"[{error}]", file=sys.stderr)
            self._options = replace(self._options, keep=False)

    def packed_on_disk(
        self, origin: "Origin", num_bytes: int, pack: Callable[[Path, "OnProgress"], object]
    ) -> Path | None:
        """Let `pack` write a copy of a model that does not fit in memory, if the user agrees.

        Returns the copy's directory, or None if the user did not agree. Raises `TandemError` if
        the copy cannot be written.
        """
        copies = kept_copies(self._options)
        agrees = self._options.pack_to_disk
        if agrees is None and self._may_ask and _is_on_terminal():
            agrees = _ask_to_pack(num_bytes, copies.directory)
        if not agrees:
            return None
        bar = None if self._quiet else PackingBar()
        try:
            found = copies.write(
                origin, num_bytes, lambda path: pack(path, bar or (lambda *_: None))
            )
        finally:
            if bar is not None:
                bar.close()
        if found is None:
            raise ModelError(f"another process writes {origin.name}; wait for it, and start again")
        return found

    def how_to_pack(self, num_bytes: int) -> str:
        """Return a text about --pack-to-disk for a model that does not fit in memory."""
        return (
            f"--pack-to-disk writes it to {kept_copies(self._options).directory} once "
            f"({format_bytes(num_bytes)}, about {_minutes(num_bytes)}) and runs it from there"
        )

    def begin(self, origin: "Origin", model: "PreTrainedModel", seconds: float) -> None:
        """Start writing a copy of a model that took `seconds` to load, if the user wants it."""
        num_bytes = int(model.get_memory_footprint())
        if not self._user_agrees(num_bytes, seconds):
            return
        self._total_bytes = num_bytes
        copies = kept_copies(self._options)
        if not self._quiet:
            print(
                f"[keeping a packed copy of {format_bytes(num_bytes)} in {copies.directory}, which "
                "the next start maps; tandem models lists them]",
                file=sys.stderr,
            )

        def work() -> None:
            import tandem

            try:
                copies.write(
                    origin,
                    num_bytes,
                    lambda path: tandem.save(model, path, on_progress=self._note),
                )
            except _LeftError:
                pass
            except TandemError as error:
                self._failure = error

        self._thread = threading.Thread(target=work, name="tandem-keep", daemon=True)
        self._thread.start()

    def finish(self) -> None:
        """Wait until the copy is written; Ctrl-C stops the writing and removes the partial copy."""
        if self._thread is None:
            return
        try:
            self._wait(self._thread)
        except KeyboardInterrupt:
            self._is_leaving = True
            self._thread.join()
            print("\n[no packed copy is kept]", file=sys.stderr)
        if self._failure is not None:
            print(f"[{self._failure}]", file=sys.stderr)
        self._thread = None

    def _wait(self, thread: threading.Thread) -> None:
        is_shown = False
        while thread.is_alive():
            thread.join(0.5)
            if thread.is_alive() and not self._quiet and sys.stderr.isatty():
                share = self._done_bytes / max(1, self._total_bytes)
                print(f"\r[packed copy: {share:.0%}, Ctrl-C leaves it] ", end="", file=sys.stderr)
                is_shown = True
        if is_shown:
            print(file=sys.stderr)

    def _note(self, done_bytes: int) -> None:
        self._done_bytes = done_bytes
        if self._is_leaving:
            raise _LeftError

    def _user_agrees(self, num_bytes: int, seconds: float) -> bool:
        if self._options.keep is not None:
            return self._options.keep
        if seconds < _SLOW_SECONDS:
            return False
        answer = _Answer(cache_dir() / "keep")
        if answer.is_given is None and self._may_ask and _is_on_terminal():
            answer.ask(num_bytes, seconds)
        return bool(answer.is_given)


def _ask_to_pack(num_bytes: int, directory: Path) -> bool:
    print(
        "The model does not fit into memory. Pack it once, so that it runs from the disk? The copy "
        f"takes {format_bytes(num_bytes)} in {directory}, and about {_minutes(num_bytes)}. [Y/n] ",
        end="", file=sys.stderr, flush=True,
    )  # fmt: skip
    line = sys.stdin.readline()
    return bool(line) and line.strip().lower() in ("", "y", "yes")


def _minutes(num_bytes: int) -> str:
    minutes = max(1, round(num_bytes / _PACKED_BYTES_PER_SECOND / 60))
    return f"{minutes} minute" + ("s" if minutes > 1 else "")


class _LeftError(Exception):
    """Ends the thread that writes a copy, after the user refused to wait for it."""


class _Answer:
    """The user's answer to the question whether to keep packed copies, stored in a file."""

    def __init__(self, file: Path) -> None:
        self._file = file
        try:
            self.is_given: bool | None = file.read_text(encoding="utf-8").strip() == "yes"
        except OSError:
            self.is_given = None

    def ask(self, num_bytes: int, seconds: float) -> None:
        print(
            f"Loading took {seconds:.0f} s, most of it to convert weights. Keep packed copies of "
            f"such models, so that the next start takes seconds? This one takes "
            f"{format_bytes(num_bytes)} of the disk. [Y/n] ",
            end="",
            file=sys.stderr,
            flush=True,
        )
        line = sys.stdin.readline()
        if not line:
            return
        self.is_given = line.strip().lower() in ("", "y", "yes")
        try:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            self._file.write_text("yes\n" if self.is_given else "no\n", encoding="utf-8")
        except OSError:  # the user is asked again next time
            return


def _is_on_terminal() -> bool:
    return sys.stdin.isatty() and sys.stderr.isatty()
