"""Calls with a life of their own (experts, attention, packed layers) as one operation each.

Code that records or captures a decode step puts an `Interceptor` in their way; other code calls the
function.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Protocol

import torch

# Kinds of `opaque` operations.
DENSE = "dense"
GROUPS = "groups"
ROWS = "rows"
ATTENTION = "attention"
EXPERTS = "experts"
STATES = "states"
SELECTION = "selection"


class Interceptor(Protocol):
    """Meets opaque calls while a step runs: a recorder, or what captures a step otherwise."""

    is_capturing: bool
    """Whether the step is noted and not done."""

    def call(self, kind: str, function: Callable[..., Any], args: tuple[object, ...]) -> Any:
        """Return what a call returns, however that comes to be."""


ACTIVE: ContextVar[Interceptor | None] = ContextVar("tandem_recorder", default=None)


def is_capturing() -> bool:
    """Tell whether the step that is under way is noted and not done."""
    interceptor = ACTIVE.get()
    return interceptor is not None and interceptor.is_capturing


@contextmanager
def intercepted(interceptor: Interceptor) -> Iterator[None]:
    """Let an interceptor meet the opaque calls inside the context."""
    token = ACTIVE.set(interceptor)
    try:
        yield
    finally:
        ACTIVE.reset(token)


def opaque(kind: str, function: Callable[..., Any], *args: object) -> Any:
    """Call a function; while a step is recorded, as one operation of this kind.

    Its tensors are among `args`, not in a closure, and it does the same each time.
    """
    if torch.compiler.is_compiling():  # native calls take addresses, which a graph has not
        return _uncompiled(function, *args)
    recorder = ACTIVE.get()
    return function(*args) if recorder is None else recorder.call(kind, function, args)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _uncompiled(function: Callable[..., Any], *args: object) -> Any:
    return function(*args)
