"""DALI's Algorithm 2: after every window of steps, the best absent experts replace the worst.

Read as in papers.md 1.11: the lowest scores leave (the printed algorithm says TopK, the prose the
lowest), a swap needs a better score, scores restart with each window, prefill does not count.
"""

from collections.abc import Sequence

from tandem.policy.eviction.policy import Eviction
from tandem.policy.plan import Geometry, LayerLoad


class DaliWindow(Eviction):
    """Scores experts by their tokens within the window (equation 12)."""

    background = "always"

    def __init__(self, geometry: Geometry, *, window: int = 4, swaps: int | None = None) -> None:
        """Use w_size = `window` steps and u_size = `swaps` (paper: 1 of 8 experts, 8 of 64)."""
        self._geometry = geometry
        self._window = window
        self._swaps = swaps or (8 if geometry.num_experts >= 32 else 1)
        self._score = [0] * (geometry.num_layers * geometry.num_experts)
        self._is_prefill = False
        self._steps_of_layer = [0] * geometry.num_layers

    def begin_step(self, *, is_prefill: bool) -> None:
        """Note the phase."""
        self._is_prefill = is_prefill

    def touch(self, load: LayerLoad) -> None:
        """Add this step's tokens to the scores; a full window starts them again."""
        if self._is_prefill:
            return
        num_experts, score = self._geometry.num_experts, self._score
        first = load.layer * num_experts
        if self._steps_of_layer[load.layer] == self._window:
            score[first : first + num_experts] = [0] * num_experts
            self._steps_of_layer[load.layer] = 0
        self._steps_of_layer[load.layer] += 1
        for expert, tokens in zip(load.experts, load.tokens, strict=True):
            score[first + expert] += tokens

    def candidates(
        self, layer: int, misses: Sequence[int], slot_of: Sequence[int]
    ) -> Sequence[int]:
        """Return the `swaps` best absent experts at the end of a window, else none."""
        if self._is_prefill or self._steps_of_layer[layer] < self._window:
            return ()
        first, score = layer * self._geometry.num_experts, self._score
        keys = range(first, first + self._geometry.num_experts)
        absent = [key for key in keys if slot_of[key] < 0 and score[key] > 0]
        absent.sort(key=lambda key: (-score[key], key))
        return absent[: self._swaps]

    def scores(self, keys: Sequence[int]) -> list[float]:
        """Return the tokens within the window."""
        score = self._score
        return [score[key] for key in keys]

    def admits(self, newcomer: float, victim: float) -> bool:
        """Swap only for a better score."""
        return newcomer > victim
