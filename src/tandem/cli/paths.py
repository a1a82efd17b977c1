"""Where Tandem keeps what it builds on this machine."""

import os
from pathlib import Path


def cache_dir() -> Path:
    """Return $TANDEM_CACHE, or `tandem` in the user's cache directory."""
    if chosen := os.environ.get("TANDEM_CACHE"):
        return Path(chosen).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "tandem"
