"""The costs of multi-token decode steps: measured while they run, and interpolated by a shape."""

from collections import deque
from dataclasses import dataclass, field
from math import exp, log
from statistics import median

from tandem.policy.speculation.step_shape import StepShape, shape_of_bytes

_KEPT = 31  # latest steps of a size, of which the median counts
# If a size is not used for this many steps, the shape replaces its own measurements: the machine
# may have been busy.
_FORGOTTEN_AFTER = 256
# The level of all sizes follows about the latest 30 steps. The slope changes slowly.
_LEVEL_DECAY, _SLOPE_DECAY = 0.97, 0.998
# Trust in a shape, as the number of steps at sizes of 1 and e tokens that it outweighs: for a
# typical shape, and for one measured on the experts that tokens touch. Steps of unusual sizes are
# weaker evidence, because they find the expert cache as usual steps leave it.
_TYPICAL, TOUCHED = 3.0, 30.0
# After this many steps of a size, half of its own deviation is trusted.
_OWN_WEIGHT = 15.0
_OUTLIER = 0.3
_LEAST_SECONDS = 1e-9


@dataclass(slots=True)
class _Line:
    """A line fitted to points, recent ones weighted more; flat while few points are known."""

    weight: float = 0.0
    x: float = 0.0
    y: float = 0.0
    xx: float = 0.0
    xy: float = 0.0

    def add(self, x: float, y: float) -> None:
        """Add a point."""
        if self.weight:
            beyond_x, beyond_y = x - self.x / self.weight, y - self.y / self.weight
            self.xx = self.xx * _SLOPE_DECAY + beyond_x * beyond_x
            self.xy = self.xy * _SLOPE_DECAY + beyond_x * beyond_y
        self.weight = self.weight * _LEVEL_DECAY + 1
        self.x = self.x * _LEVEL_DECAY + x
        self.y = self.y * _LEVEL_DECAY + y

    def at(self, x: float, level_weight: float) -> float:
        """Return the line's value at `x`; 0 without points. `level_weight` flattens the line."""
        if not self.weight:
            return 0.0
        slope = self.xy / (self.xx + level_weight)
        return self.y / self.weight + slope * (x - self.x / self.weight)


@dataclass(slots=True)
class StepCosts:
    """Seconds of a step by its number of tokens.

    On a log scale the seconds are the sum of the shape, a line, and a deviation of each size. The
    line's level changes with the load of the machine, which makes steps of all sizes faster or
    slower together; its slope corrects the shape's cost of more tokens.
    """

    shape: StepShape = field(default_factory=lambda: shape_of_bytes(1.0, 1.0))
    shape_weight: float = _TYPICAL
    _line: _Line = field(default_factory=_Line)
    _own: dict[int, deque[tuple[int, float]]] = field(default_factory=dict)
    """For each step size, the latest steps: (step number, log of its time minus that of shape and
    line)."""
    _num_steps: int = 0

    def add(self, num_tokens: int, seconds: float) -> None:
        """Record a step's seconds; must be called only once it is settled how such steps run.

        The first step of each size is not counted, because it was still compared with the model's
        own code.
        """
        self._num_steps += 1
        if num_tokens not in self._own:
            self._own[num_tokens] = deque(maxlen=_KEPT)
            return
        x = log(num_tokens)
        found = log(max(seconds, _LEAST_SECONDS)) - log(self.shape(num_tokens))
        if self._line.weight:
            expected = self._line.at(x, self.shape_weight) + self._beyond(num_tokens)
            found = expected + min(_OUTLIER, max(-_OUTLIER, found - expected))
        self._line.add(x, found)
        self._own[num_tokens].append((self._num_steps, found - self._line.at(x, self.shape_weight)))

    def seconds(self, num_tokens: int) -> float | None:
        """Return the seconds of a step of `num_tokens` tokens; None before any measurement."""
        if not self._line.weight:
            return None
        beyond = self._line.at(log(num_tokens), self.shape_weight) + self._beyond(num_tokens)
        return self.shape(num_tokens) * exp(beyond)

    def num_known(self, num_tokens: int) -> int:
        """Return how many recent measurements of steps of a size are kept; at most 31."""
        return len(self._latest(num_tokens))

    def _beyond(self, num_tokens: int) -> float:
        """Return a size's deviation from shape and line, on the log scale; 0 if it is not known."""
        latest = self._latest(num_tokens)
        if not latest:
            return 0.0
        return median(latest) * len(latest) / (len(latest) + _OWN_WEIGHT)

    def _latest(self, num_tokens: int) -> list[float]:
        since = self._num_steps - _FORGOTTEN_AFTER
        return [x for number, x in self._own.get(num_tokens, ()) if number >= since]
