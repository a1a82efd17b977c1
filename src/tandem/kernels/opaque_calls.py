"""Opaque calls: experts, attention and packed layers, each as one operation of a recorded step.

Code that records or captures a decode step intercepts opaque calls with an `Interceptor`; without
an interceptor, the function is called directly.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Protocol, Self, TypeVar, cast

import torch
from torch import Tensor

# Kinds of `opaque` operations.
DENSE = "dense"
GROUPS = "groups"
ROWS = "rows"
DISK_ROWS = "rows_from_disk"
NGRAMS = "ngrams"
ATTENTION = "attention"
EXPERTS = "experts"
STATES = "states"
SELECTION = "selection"
MIX_IN = "mix_in"
MIX_OUT = "mix_out"
ROUTER_INPUT = "router_input"
WITHOUT_EFFECTS = {GROUPS, ROWS, MIX_IN, MIX_OUT}
"""Kinds of calls that change none of their arguments; all other kinds count as having effects."""


T = TypeVar("T")
_LISTS = frozenset((tuple, list, dict))


class Interceptor(Protocol):
    """Intercepts opaque calls while a step runs, to record or capture it."""

    is_capturing: bool
    """Whether calls are recorded instead of executed."""

    def call(self, kind: str, function: Callable[..., Any], args: tuple[object, ...]) -> Any:
        """Return the result of `function(*args)`, or a stand-in while calls are only recorded."""


ACTIVE: ContextVar[Interceptor | None] = ContextVar("tandem_recorder", default=None)


def is_capturing() -> bool:
    """Tell whether the current step is being captured, not executed."""
    interceptor = ACTIVE.get()
    return interceptor is not None and interceptor.is_capturing


@contextmanager
def intercepted(interceptor: Interceptor) -> Iterator[None]:
    """Let an interceptor receive the opaque calls in the `with` body."""
    token = ACTIVE.set(interceptor)
    try:
        yield
    finally:
        ACTIVE.reset(token)


class Meeting:
    """A mix-in with which a torch mode receives each opaque call as a whole, not its operations.

    A class must list `Meeting` before the mode among its bases. While `is_paused`, the mode must
    execute operations unchanged and without recording them.
    """

    is_capturing = False
    is_paused = False

    def call(self, kind: str, function: Callable[..., Tensor], args: tuple[object, ...]) -> Tensor:
        """Call a function with `is_paused` set, and return its result; see `Interceptor`."""
        self.is_paused = True
        try:
            return function(*args)
        finally:
            self.is_paused = False

    def __enter__(self) -> Self:
        self._token = ACTIVE.set(self)
        super().__enter__()  # type: ignore[misc]
        return self

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)  # type: ignore[misc]
        ACTIVE.reset(self._token)


def mapped(function: Callable[[object], object], arguments: T) -> T:
    """Return an operation's arguments with a function applied to each, also to nested ones.

    Lists, tuples and dicts in `arguments` are copied, and their items replaced. A step has
    thousands of operations, and torch's own tree walk would take much of the time that recording a
    step takes.
    """
    values: object = arguments
    found: object
    # Compare exact types, because a named tuple may be a single argument. Most arguments contain no
    # further list.
    if type(values) is tuple:
        found = tuple([mapped(function, x) if type(x) in _LISTS else function(x) for x in values])
    elif type(values) is list:
        found = [mapped(function, x) if type(x) in _LISTS else function(x) for x in values]
    elif type(values) is dict:
        found = {name: mapped(function, x) for name, x in values.items()}
    else:
        found = function(values)
    return cast("T", found)


def opaque(kind: str, function: Callable[..., T], *args: object) -> T:
    """Return `function(*args)`; an interceptor receives the call as one operation of this kind.

    The function's tensors must be among `args`, not in a closure. The function must do the same on
    each call, and return a tensor, a tuple of tensors, or None.
    """
    # Native calls take addresses, which a compiled graph does not have.
    if torch.compiler.is_compiling():
        result: T = _uncompiled(function, *args)
        return result
    recorder = ACTIVE.get()
    return function(*args) if recorder is None else cast("T", recorder.call(kind, function, args))


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _uncompiled(function: Callable[..., T], *args: object) -> T:
    return function(*args)
