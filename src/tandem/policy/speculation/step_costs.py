"""What decode steps of several tokens cost: measured as they are done, between them by a shape."""

from collections import deque
from dataclasses import dataclass, field
from math import exp, log
from statistics import median

from tandem.policy.speculation.step_shape import StepShape, shape_of_bytes

_KEPT = 15  # latest steps of a size; their median is what is special to it
# Steps after which a size that nothing chose is as the shape says: the machine may have been busy.
_FORGOTTEN_AFTER = 256
# What all sizes have in common follows the latest 30 steps or so.
_DECAY = 0.97
# How strongly the shape is believed: as so many steps of sizes as far apart as 1 and e tokens.
_SHAPE_WEIGHT = 0.5
# What a size has to itself is believed by half after so many steps of it.
_OWN_WEIGHT = 5.0
_OUTLIER = 0.3
_LEAST_SECONDS = 1e-9


@dataclass(slots=True)
class _Line:
    """A line through decayed points, with a prior that it is level."""

    weight: float = 0.0
    x: float = 0.0
    xx: float = 0.0
    y: float = 0.0
    xy: float = 0.0

    def add(self, x: float, y: float) -> None:
        """Note a point."""
        keep = _DECAY
        self.weight, self.x = self.weight * keep + 1, self.x * keep + x
        self.xx, self.y = self.xx * keep + x * x, self.y * keep + y
        self.xy = self.xy * keep + x * y

    def at(self, x: float) -> float:
        """Return the line's height; 0 without any point."""
        if not self.weight:
            return 0.0
        mean_x, mean_y = self.x / self.weight, self.y / self.weight
        spread = self.xx - self.x * mean_x + _SHAPE_WEIGHT
        return mean_y + (self.xy - self.x * mean_y) / spread * (x - mean_x)


@dataclass(slots=True)
class StepCosts:
    """Seconds of a step by its number of tokens.

    Their logarithms are those of the shape, and a line: all sizes become faster or slower together,
    when the machine is busy, and more tokens may cost more or less than the shape tells. What is
    left is special to a size.
    """

    shape: StepShape = field(default_factory=lambda: shape_of_bytes(1.0, 1.0))
    _line: _Line = field(default_factory=_Line)
    _own: dict[int, deque[tuple[int, float]]] = field(default_factory=dict)
    """Of each size the latest steps: their numbers, and what they took beyond shape and line."""
    _num_steps: int = 0

    def add(self, num_tokens: int, seconds: float) -> None:
        """Note a step that is replayed, or never will be; the first of a size is not counted.

        That one was still compared with the model's own.
        """
        self._num_steps += 1
        if num_tokens not in self._own:
            self._own[num_tokens] = deque(maxlen=_KEPT)
            return
        x = log(num_tokens)
        found = log(max(seconds, _LEAST_SECONDS)) - log(self.shape(num_tokens))
        if self._line.weight:
            expected = self._line.at(x) + self._beyond(num_tokens)
            found = expected + min(_OUTLIER, max(-_OUTLIER, found - expected))
        self._line.add(x, found)
        self._own[num_tokens].append((self._num_steps, found - self._line.at(x)))

    def seconds(self, num_tokens: int) -> float | None:
        """Return what a step of so many tokens takes; None before any was measured."""
        if not self._line.weight:
            return None
        beyond = self._line.at(log(num_tokens)) + self._beyond(num_tokens)
        return self.shape(num_tokens) * exp(beyond)

    def num_known(self, num_tokens: int) -> int:
        """Return how many steps of a size were measured lately."""
        return len(self._latest(num_tokens))

    def _beyond(self, num_tokens: int) -> float:
        """Return what is special to a size, as far as it is known."""
        latest = self._latest(num_tokens)
        if not latest:
            return 0.0
        return median(latest) * len(latest) / (len(latest) + _OWN_WEIGHT)

    def _latest(self, num_tokens: int) -> list[float]:
        since = self._num_steps - _FORGOTTEN_AFTER
        return [x for number, x in self._own.get(num_tokens, ()) if number >= since]
