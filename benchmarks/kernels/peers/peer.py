"""The interface of a peer."""

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from tandem.bench.kernels import Work


@dataclass(frozen=True, slots=True)
class Prepared:
    """Weights in memory: `run(tokens, call)` computes call number `call` and waits for it."""

    run: Callable[[int, int], None]
    bytes_per_call: int
    """Bytes of weights that one call must read."""
    format: str
    """The peer's own name of the format that it ran."""


class Peer(Protocol):
    """A system that computes experts."""

    @property
    def name(self) -> str:
        """The name in reports."""
        ...

    def why_missing(self) -> str | None:
        """Return in a few words why it cannot run here, or None."""
        ...

    def supports(self, format_name: str) -> bool:
        """Tell whether it has a format of about as many bits."""
        ...

    def prepare(self, work: Work) -> Prepared:
        """Fill its own store; called in a process of its own."""
        ...


def why_not_installed(module: str, package: str) -> str | None:
    """Return a reason if a Python module is not installed."""
    if importlib.util.find_spec(module) is None:
        return f"not installed (pip install {package})"
    return None
