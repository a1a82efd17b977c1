"""Tandem's code that replaces a model's own in a shallow copy; the model itself stays unchanged.

The model's code calls a substitute by name: as a method of the model's modules, or as a function in
the model's file. Where a substitute returns None, the model's own code runs.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from tandem.foreign_types import ModelPart

Function = Callable[..., Any]


class Substitution(NamedTuple):
    """A replacement for one method of all modules for which `matches` returns True."""

    matches: Callable[[ModelPart], bool]
    """Whether a module has the form that the substitute computes."""
    forward: Function
    """The replacement; its arguments are the copied module and the method's arguments."""
    method: str = "forward"


def instead(own: Function, forward: Function) -> Function:
    """Return a function that calls `forward`, and falls back to `own` if it returns None."""

    def call(*args: object, **kwargs: object) -> object:
        result = forward(*args, **kwargs)
        return own(*args, **kwargs) if result is None else result

    return call


def has(*names: str) -> Callable[[ModelPart], bool]:
    """Return a test for modules that have all these attributes."""
    return lambda module: all(hasattr(module, name) for name in names)
