"""What decode steps of several tokens cost, measured as they are done."""

from collections import deque
from dataclasses import dataclass, field
from statistics import median

_KEPT = 9  # latest steps of a size; their median is its time
# Steps after which a size that nothing chose is measured again: the machine may have been busy.
_FORGOTTEN_AFTER = 256
# Before a size is measured: a second token of a sequence touches .57 to .71 times the bytes of the
# first on real routing, four touch 2.4 to 2.9 times as many as one.
_GROWTH = 0.75


@dataclass(slots=True)
class _Size:
    """The latest steps of so many tokens."""

    last: int
    seconds: deque[float] = field(default_factory=lambda: deque(maxlen=_KEPT))


@dataclass(slots=True)
class StepCosts:
    """Seconds of a step by its number of tokens."""

    _sizes: dict[int, _Size] = field(default_factory=dict)
    _num_steps: int = 0

    def add(self, num_tokens: int, seconds: float) -> None:
        """Note a step that is replayed, or never will be; the first of a size is not counted.

        That one was still compared with the model's own.
        """
        self._num_steps += 1
        size = self._sizes.get(num_tokens)
        if size is None:
            self._sizes[num_tokens] = _Size(self._num_steps)
            return
        size.last = self._num_steps
        size.seconds.append(seconds)

    def seconds(self, num_tokens: int) -> float | None:
        """Return what a step of so many tokens takes, by those of its size or else of others."""
        known = {n: size for n, size in self._sizes.items() if self._is_known(size)}
        if not known:
            return None
        nearest = min(known, key=lambda n: abs(n - num_tokens))
        growth: float = (num_tokens / nearest) ** _GROWTH
        return median(known[nearest].seconds) * growth

    def _is_known(self, size: _Size) -> bool:
        return bool(size.seconds) and self._num_steps - size.last <= _FORGOTTEN_AFTER
