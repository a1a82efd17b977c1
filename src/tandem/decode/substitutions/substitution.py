"""Code of ours that stands in place of a model's, in a shallow copy of it; models stay as they are.

A model's code meets it by a name: of a method of its modules, or of a function that a forward finds
in its file. What it returns as None the model's own code computes after all.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from tandem.foreign_types import ModelPart

Function = Callable[..., Any]


class Substitution(NamedTuple):
    """A method of some modules."""

    matches: Callable[[ModelPart], bool]
    """Whether a module is of the form that is known here."""
    forward: Function
    """Takes the module of the copy, and what the method takes."""
    method: str = "forward"


def instead(own: Function, forward: Function) -> Function:
    """Return what calls `forward`, and `own` where that returns None."""

    def call(*args: object, **kwargs: object) -> object:
        result = forward(*args, **kwargs)
        return own(*args, **kwargs) if result is None else result

    return call


def has(*names: str) -> Callable[[ModelPart], bool]:
    """Return what tells whether a module has all attributes of some names."""
    return lambda module: all(hasattr(module, name) for name in names)
