"""Chooses an option for each part of a model, for a small total loss within a number of bytes.

Pure functions: parts are lists of options, and an option has a size and a loss. Equal inputs give
equal choices.
"""

from collections.abc import Sequence
from typing import NamedTuple


class Option(NamedTuple):
    """One way to store a part of a model."""

    name: str
    num_bytes: int
    loss: float
    """The divergence that this option adds to the model, in nats."""


def choose_within(parts: Sequence[Sequence[Option]], num_bytes: int) -> list[Option] | None:
    """Return an option for each part, with a small total loss, in at most `num_bytes` bytes.

    Every part starts with its smallest option. Then parts step to larger options along their convex
    hulls: the step that saves the most loss per byte comes first (the Lagrangian's choice), and a
    step that does not fit is skipped. The remaining bytes are spent on the changes that save the
    most loss. Returns None if the smallest options do not fit.
    """
    hulls = [_hull(part) for part in parts]
    at = [0] * len(hulls)
    left = num_bytes - sum(hull[0].num_bytes for hull in hulls)
    if left < 0:
        return None
    steps = sorted(
        (-_gain_of_a_byte(hull[step], hull[step + 1]), part, step)
        for part, hull in enumerate(hulls)
        for step in range(len(hull) - 1)
    )
    for _, part, step in steps:
        more = hulls[part][step + 1].num_bytes - hulls[part][step].num_bytes
        if at[part] == step and more <= left:
            at[part], left = step + 1, left - more
    chosen = [hull[step] for hull, step in zip(hulls, at, strict=True)]
    return _filled(parts, chosen, left)


def _gain_of_a_byte(small: Option, large: Option) -> float:
    return (small.loss - large.loss) / (large.num_bytes - small.num_bytes)


def _hull(options: Sequence[Option]) -> list[Option]:
    """Return the options on the convex hull of size and loss, smallest first."""
    hull: list[Option] = []
    for option in sorted(options, key=lambda o: (o.num_bytes, o.loss, o.name)):
        if hull and option.loss >= hull[-1].loss:
            continue
        while len(hull) > 1 and _gain_of_a_byte(hull[-1], option) >= _gain_of_a_byte(*hull[-2:]):
            hull.pop()
        hull.append(option)
    return hull


def _filled(parts: Sequence[Sequence[Option]], chosen: list[Option], left: int) -> list[Option]:
    """Spend the `left` bytes on changes of options; return `chosen` with the changes.

    Of all changes that fit, the one that saves the most loss comes first.
    """
    while True:
        found = [
            (chosen[number].loss - option.loss, -number, option)
            for number, options in enumerate(parts)
            for option in options
            if option.loss < chosen[number].loss
            and option.num_bytes - chosen[number].num_bytes <= left
        ]
        if not found:
            return chosen
        _, number, option = max(found)
        left -= option.num_bytes - chosen[-number].num_bytes
        chosen[-number] = option
