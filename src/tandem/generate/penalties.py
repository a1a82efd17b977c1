"""Penalties and biases of OpenAI's API: what is added to a score before a token is chosen.

Loads no torch: `Penalties` goes by pipe.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from tandem.generate.running import Constraint


@dataclass(frozen=True, slots=True, kw_only=True)
class Penalties:
    """How scores change with what has been generated; the prompt does not count."""

    presence: float = 0.0
    """Taken from every token that has come."""
    frequency: float = 0.0
    """Taken once for each time that it has come."""
    bias: tuple[tuple[int, float], ...] = ()
    """Added to tokens, by id."""


class PenalisedScores:
    """One answer under penalties; a `Constraint` that forbids nothing."""

    def __init__(self, penalties: Penalties) -> None:
        """Begin an answer."""
        self._penalties = penalties
        self._counts: Counter[int] = Counter()

    def restrict(self, scores: "Tensor") -> "Tensor":
        """Return scores (1, vocabulary) as fp32 with penalties and biases."""
        presence, frequency = self._penalties.presence, self._penalties.frequency
        added = dict(self._penalties.bias)
        for token, count in self._counts.items():
            added[token] = added.get(token, 0.0) - presence - count * frequency
        changed = scores.float().clone()
        changed[0, list(added)] += changed.new_tensor(list(added.values()))
        return changed

    def accept(self, token: int) -> bool:
        """Count the token that came."""
        self._counts[token] += 1
        return False


class Together:
    """Several constraints at once, one after the other."""

    def __init__(self, constraints: "Sequence[Constraint]") -> None:
        """Follow them in their order."""
        self._constraints = constraints

    def restrict(self, scores: "Tensor") -> "Tensor":
        """Return scores (1, vocabulary) as all of them leave them."""
        for constraint in self._constraints:
            scores = constraint.restrict(scores)
        return scores

    def accept(self, token: int) -> bool:
        """Tell all of them; nothing may follow if one says so."""
        return any([constraint.accept(token) for constraint in self._constraints])
