"""What was measured on this machine, kept in the cache directory for the next time."""

import contextlib
import warnings
from pathlib import Path

from tandem.core.errors import TandemWarning


def keep_file(path: Path, text: str) -> None:
    """Write a file, whole or not at all; where the system does not let, a warning says so."""
    partial = path.with_name(f"{path.name}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(text, encoding="utf-8")
        partial.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)
        warnings.warn(
            f"what was measured is not kept, and the next start measures again: {path.parent}: "
            f"{error.strerror or error}; TANDEM_CACHE names another directory",
            TandemWarning,
            stacklevel=2,
        )
