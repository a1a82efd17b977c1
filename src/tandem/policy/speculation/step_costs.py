"""What decode steps of several tokens cost, measured as they are done."""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import exp, log
from statistics import median

_KEPT = 15  # latest steps of a size; their median is its time
# Steps after which a size that nothing chose is measured again: the machine may have been busy.
_FORGOTTEN_AFTER = 128
# Before a size is measured: a second token of a sequence touches .57 to .71 times the bytes of the
# first on real routing, four touch 2.4 to 2.9 times as many as one.
_GROWTH = 0.75
_LEAST_GROWTH = 0.4  # what looks like less is noise
# How far a step moves the level, as far as it is no outlier.
_LEVEL_SHARE, _OUTLIER = 0.05, 0.3
_LEAST_SECONDS = 1e-9
_OTHERS_WEIGHT = 0.5  # what other sizes say of one counts as so many steps of its own


@dataclass(slots=True)
class _Size:
    """The latest steps of so many tokens."""

    found: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=_KEPT))
    """Of each the number of the step, and the logarithm of its seconds less the level then."""

    def since(self, step: int) -> list[float]:
        """Return the logarithms from a step on."""
        return [distance for number, distance in self.found if number >= step]


@dataclass(slots=True)
class StepCosts:
    """Seconds of a step by its number of tokens.

    All sizes become faster or slower together, when an expert cache fills or the machine is busy:
    a level that each step moves, while each size has its distance from it.
    """

    growth: float = _GROWTH
    """With which power of their tokens steps grow, before two sizes are known."""
    _sizes: dict[int, _Size] = field(default_factory=dict)
    _level: float = 0.0
    _num_steps: int = 0

    def add(self, num_tokens: int, seconds: float) -> None:
        """Note a step that is replayed, or never will be; the first of a size is not counted.

        That one was still compared with the model's own.
        """
        self._num_steps += 1
        size = self._sizes.get(num_tokens)
        if size is None:
            self._sizes[num_tokens] = _Size()
            return
        found = log(max(seconds, _LEAST_SECONDS))
        if latest := self._latest(size):
            beyond = found - median(latest) - self._level
            self._level += _LEVEL_SHARE * min(_OUTLIER, max(-_OUTLIER, beyond))
        size.found.append((self._num_steps, found - self._level))

    def seconds(self, num_tokens: int) -> float | None:
        """Return what a step of so many tokens takes, by those of its size or else of others."""
        latest = {n: self._latest(size) for n, size in self._sizes.items()}
        known = {n: median(distances) for n, distances in latest.items() if distances}
        if not known:
            return None
        others = {n: x for n, x in known.items() if n != num_tokens}
        if num_tokens not in known:
            distance = self._distance(num_tokens, others)
        elif others:
            share = self.num_known(num_tokens) / (self.num_known(num_tokens) + _OTHERS_WEIGHT)
            by_others = self._distance(num_tokens, others)
            distance = share * known[num_tokens] + (1 - share) * by_others
        else:
            distance = known[num_tokens]
        return exp(self._level + distance)

    def num_known(self, num_tokens: int) -> int:
        """Return how many steps of a size its time is known by."""
        size = self._sizes.get(num_tokens)
        return 0 if size is None else len(self._latest(size))

    def _distance(self, num_tokens: int, known: Mapping[int, float]) -> float:
        """Return a size's distance from the level by those of others: between two, or beyond."""
        below = max((n for n in known if n < num_tokens), default=None)
        above = min((n for n in known if n > num_tokens), default=None)
        if below is not None and above is not None:
            share = log(num_tokens / below) / log(above / below)
            return known[below] * (1 - share) + known[above] * share
        nearest = above if below is None else below
        assert nearest is not None
        return known[nearest] + log(num_tokens / nearest) * self._growth(known)

    def _growth(self, known: Mapping[int, float]) -> float:
        least, most = min(known), max(known)
        if least == most:
            return self.growth
        found = (known[most] - known[least]) / log(most / least)
        return min(1.0, max(_LEAST_GROWTH, found))

    def _latest(self, size: _Size) -> list[float]:
        return size.since(self._num_steps - _FORGOTTEN_AFTER)
