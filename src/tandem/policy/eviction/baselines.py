"""Baselines for the default eviction policy: the usual policies, and those of papers."""

from collections.abc import Sequence

from tandem.policy.decay import DecayedCounts
from tandem.policy.eviction.policy import Eviction
from tandem.policy.plan import Geometry, LayerLoad


class Lru(Eviction):
    """Keeps the most recently used experts; every miss enters. The simplest example of a policy."""

    background = "always"

    def __init__(self, geometry: Geometry) -> None:
        """Start with no expert used."""
        self._num_experts = geometry.num_experts
        self._last_use = [-1] * (geometry.num_layers * geometry.num_experts)
        self._step = 0

    def begin_step(self, *, is_prefill: bool) -> None:
        """Advance the step counter, which serves as the clock of uses."""
        self._step += 1

    def touch(self, load: LayerLoad) -> None:
        """Record this step as the last use of every active expert."""
        first, step, last_use = load.layer * self._num_experts, self._step, self._last_use
        for expert in load.experts:
            last_use[first + expert] = step

    def scores(self, keys: Sequence[int]) -> list[float]:
        """Return the step of each expert's last use."""
        last_use = self._last_use
        return [last_use[key] for key in keys]


class Fifo(Eviction):
    """Keeps the most recently inserted experts; every miss enters. Paper 2's default."""

    background = "always"

    def __init__(self, geometry: Geometry) -> None:
        """Start with nothing inserted."""
        self._arrival = [0] * (geometry.num_layers * geometry.num_experts)
        self._inserted = 0

    def scores(self, keys: Sequence[int]) -> list[float]:
        """Return the number of each expert's latest insertion; 0 if it has had none."""
        arrival = self._arrival
        return [arrival[key] for key in keys]

    def inserted(self, key: int) -> None:
        """Give the expert the next insertion number."""
        self._inserted += 1
        self._arrival[key] = self._inserted


class Decayed(Eviction):
    """Keeps, and admits, the experts with the highest decayed token counts."""

    background = "idle"

    def __init__(self, geometry: Geometry, *, decay: float = 0.97) -> None:
        """Start all counts at zero; a step weighs `decay` times as much as the step after it."""
        self._counts = DecayedCounts(geometry.num_layers, geometry.num_experts, decay)

    def touch(self, load: LayerLoad) -> None:
        """Age the layer's counts, and add the tokens of each active expert."""
        self._counts.tick(load.layer)
        for expert, tokens in zip(load.experts, load.tokens, strict=True):
            self._counts.add(load.layer, expert, tokens)

    def scores(self, keys: Sequence[int]) -> list[float]:
        """Return the decayed counts."""
        return self._counts.of(keys)

    def admits(self, newcomer: float, victim: float) -> bool:
        """Return whether the newcomer's score is higher."""
        return newcomer > victim


class Lfu(Decayed):
    """Keeps the experts with the most tokens so far; every miss enters."""

    background = "always"

    def __init__(self, geometry: Geometry) -> None:
        """Start all counts at zero; they never fade."""
        super().__init__(geometry, decay=1.0)

    def admits(self, newcomer: float, victim: float) -> bool:
        """Return True: every miss enters."""
        return True


class Static(Eviction):
    """Changes nothing: the cache keeps its initial experts."""

    background = "never"

    def __init__(self, geometry: Geometry) -> None:
        """Ignore the geometry."""

    def candidates(
        self, layer: int, misses: Sequence[int], slot_of: Sequence[int]
    ) -> Sequence[int]:
        """Return no expert."""
        return ()

    def scores(self, keys: Sequence[int]) -> list[float]:
        """Return the same score for all experts."""
        return [0.0] * len(keys)

    def admits(self, newcomer: float, victim: float) -> bool:
        """Return False: no expert enters."""
        return False


class CopyOnMiss(Lru):
    """Paper 2: the CPU computes a miss while it is copied into the cache, up to a quota per step.

    LRU whose insertions are limited by a quota that is renewed at each step; decode only.
    """

    def __init__(self, geometry: Geometry, *, quota: int = 64) -> None:
        """Allow `quota` - 1 copies per step: the quota is counted down before it is compared."""
        super().__init__(geometry)
        self._quota = quota
        self._left = 0

    def begin_step(self, *, is_prefill: bool) -> None:
        """Renew the quota, which is 0 in a prefill: then no expert enters."""
        super().begin_step(is_prefill=is_prefill)
        self._left = 0 if is_prefill else self._quota

    def candidates(
        self, layer: int, misses: Sequence[int], slot_of: Sequence[int]
    ) -> Sequence[int]:
        """Return the first misses, as many as the rest of the step's quota allows."""
        allowed = max(0, min(len(misses), self._left - 1))
        self._left -= len(misses)
        return misses[:allowed]


class DaliWindow(Eviction):
    """DALI's Algorithm 2: after every window of steps the best absent experts replace the worst.

    Scores are tokens within the window (equation 12). Interpreted as in papers.md 1.11: experts
    with the lowest scores leave (as the prose says; the printed algorithm says TopK), a swap needs
    a better score, scores restart with each window, prefill does not count.
    """

    background = "always"

    def __init__(self, geometry: Geometry, *, window: int = 4, swaps: int | None = None) -> None:
        """Set w_size (`window` steps) and u_size (`swaps`; paper: 1 for 8 experts, 8 for 64)."""
        self._geometry = geometry
        self._window = window
        self._swaps = swaps or (8 if geometry.num_experts >= 32 else 1)
        self._score = [0] * (geometry.num_layers * geometry.num_experts)
        self._is_prefill = False
        self._steps_of_layer = [0] * geometry.num_layers

    def begin_step(self, *, is_prefill: bool) -> None:
        """Record whether the step is a prefill."""
        self._is_prefill = is_prefill

    def touch(self, load: LayerLoad) -> None:
        """Add this step's tokens to the scores, which restart after a full window."""
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
        """Return the `swaps` best absent experts at the end of a window, otherwise no experts."""
        if self._is_prefill or self._steps_of_layer[layer] < self._window:
            return ()
        first, score = layer * self._geometry.num_experts, self._score
        keys = range(first, first + self._geometry.num_experts)
        absent = [key for key in keys if slot_of[key] < 0 and score[key] > 0]
        absent.sort(key=lambda key: (-score[key], key))
        return absent[: self._swaps]

    def scores(self, keys: Sequence[int]) -> list[float]:
        """Return each expert's tokens within the window."""
        score = self._score
        return [score[key] for key in keys]

    def admits(self, newcomer: float, victim: float) -> bool:
        """Return whether the newcomer's score is higher."""
        return newcomer > victim


class HybriMoeScore(Eviction):
    """HybriMoE's score (MRS): S = a * TopP(router scores) + (1 - a) * S.

    Only fetched experts enter the cache. The router's full softmax is not kept in traces: the top-k
    weights stand for TopP, the rest is 0.
    """

    reads_weights = True  # of `LayerLoad`; the engine omits them for other policies
    background = "never"

    def __init__(self, geometry: Geometry, *, alpha: float = 0.5) -> None:
        """Set `alpha`, the weight of a new step; the default is that of the released code."""
        self._alpha = alpha
        self._scores = DecayedCounts(geometry.num_layers, geometry.num_experts, 1.0 - alpha)

    def touch(self, load: LayerLoad) -> None:
        """Add this step's gate weights, scaled to sum to `alpha`, to the decayed S.

        Token counts stand for the weights if the load has none.
        """
        layer, scores = load.layer, self._scores
        scores.tick(layer)
        amounts = load.weights or load.tokens
        scale = self._alpha / max(sum(amounts), 1e-9)
        for expert, amount in zip(load.experts, amounts, strict=True):
            scores.add(layer, expert, amount * scale)

    def scores(self, keys: Sequence[int]) -> list[float]:
        """Return S for each expert."""
        return self._scores.of(keys)
