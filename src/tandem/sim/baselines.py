"""Policies of papers for comparison with Tandem's; only the simulator uses them."""

from collections.abc import Sequence

import numpy as np

from tandem.policy.assignment.baselines import HybriMoe
from tandem.policy.assignment.problem import LayerProblem, Split, priced
from tandem.policy.decay import DecayedCounts
from tandem.policy.eviction.baselines import CopyOnMiss, HybriMoeScore
from tandem.policy.plan import Geometry, Hint, LayerLoad
from tandem.policy.prediction.calibration import Calibration
from tandem.policy.prediction.policy import Forecast, Prediction
from tandem.policy.prefetch import PrefetchChoice, PrefetchTerms

_POPULARITY_DECAY = 0.995
_TRANSITION_RATE = 1 / 32  # of the way towards what followed
_TOKEN_RATE, _MEAN_RATE = 1 / 4, 1 / 64
_MOST_TOKENS = 1024
# Milliseconds in HybriMoE's released code: an expert on the GPU, the first expert on the CPU (on
# top of its tokens), and a copy (papers.md 3.1).
_RELEASED_GPU, _RELEASED_CPU_FIRST, _RELEASED_COPY = 0.5, 0.79, 0.4179


class ReleasedHybriMoe(HybriMoe):
    """HybriMoE as released: its schedule uses the code's constants, whatever experts cost here."""

    def __init__(self, *, cpu_token: float = 1.0) -> None:
        """Use `cpu_token` milliseconds per token on the CPU: 1 DeepSeek, 0.8 Qwen2, 0.2 Mixtral."""
        self._cpu_token = cpu_token

    def assign(self, problem: LayerProblem) -> Split:
        """Return the split that the constants give, with its seconds by the real costs."""
        tokens = problem.tokens
        split = super().assign(
            problem._replace(
                cpu=[self._cpu_token * count for count in tokens],
                gpu=[_RELEASED_GPU] * len(tokens),
                cpu_first=_RELEASED_CPU_FIRST,
                link=_RELEASED_COPY,
            )
        )
        return priced(problem, split.fetch, split.spill, pipelined=True)


class FirstTokenScore(HybriMoeScore):
    """HybriMoE's score as released: it reads only the first token of a batch."""

    reads_weights = False

    def touch(self, load: LayerLoad) -> None:
        """Add the first token's experts to the score.

        All of them count equally, because traces have no router scores.
        """
        if load.routes:
            first = tuple(sorted(load.routes[0]))
            load = LayerLoad(load.layer, first, (1,) * len(first))
        super().touch(load)


class IndexedCopyOnMiss(CopyOnMiss):
    """Paper 2's N-index cache: only misses of the first N layers are copied.

    With a shared pool, the N layers have all slots, and the least recently used expert of all N
    layers is evicted. With one set per layer, the paper's M ways, the least recently used expert of
    the missed expert's layer is evicted.
    """

    def __init__(self, geometry: Geometry, *, quota: int = 64, share: float = 0.5) -> None:
        """Copy misses of the first `share` of the layers (paper 2: 14 or 16 of 32)."""
        super().__init__(geometry, quota=quota)
        self._num_layers = round(share * geometry.num_layers)

    def candidates(
        self, layer: int, misses: Sequence[int], slot_of: Sequence[int]
    ) -> Sequence[int]:
        """Return the misses that the quota allows, in the first N layers; otherwise no experts."""
        return super().candidates(layer, misses, slot_of) if layer < self._num_layers else ()


class Popularity(Prediction):
    """Predicts the most used experts of a layer (EdgeMoE's statistics): the decayed mean load."""

    def __init__(self, geometry: Geometry) -> None:
        """Start without observed loads."""
        self._num_experts = geometry.num_experts
        layers, experts = geometry.num_layers, geometry.num_experts
        self._counts = DecayedCounts(layers, experts, _POPULARITY_DECAY)
        self._weight = [0.0] * layers

    def observe(self, load: LayerLoad) -> None:
        """Add a layer's load to its decayed mean."""
        layer = load.layer
        self._counts.tick(layer)
        self._weight[layer] = self._weight[layer] * _POPULARITY_DECAY + 1.0
        for expert, tokens in zip(load.experts, load.tokens, strict=True):
            self._counts.add(layer, expert, tokens)

    def predict(self, layer: int) -> Forecast | None:
        """Return a layer's mean load as a forecast; None before its first load."""
        if not self._weight[layer]:
            return None
        first = layer * self._num_experts
        scores = self._counts.raw[first : first + self._num_experts]
        return Forecast(scores, 0.0, 1.0 / (self._counts.unit[layer] * self._weight[layer]))


class Transitions(Prediction):
    """Predicts how often experts are used after the active experts of the previous layer.

    For each layer and each expert of the previous layer, a table row has how often each of the
    layer's experts followed.
    """

    def __init__(self, geometry: Geometry) -> None:
        """Start with all experts equally likely."""
        layers, experts, top_k = geometry
        self._rows = np.full((layers, experts, experts), top_k / experts)
        self._last: LayerLoad | None = None

    def begin_step(self, token_ids: Sequence[int]) -> None:
        """Begin a step: the first layer has no previous layer."""
        self._last = None

    def observe(self, load: LayerLoad) -> None:
        """Update the table rows of the previous layer's active experts.

        Each row moves towards 1 for this layer's active experts, and towards 0 for all other
        experts.
        """
        if self._last is not None and self._last.layer == load.layer - 1:
            used = np.zeros(self._rows.shape[2])
            used[list(load.experts)] = 1.0
            above, rows = list(self._last.experts), self._rows[load.layer]
            rows[above] += _TRANSITION_RATE * (used - rows[above])
        self._last = load

    def predict(self, layer: int) -> Forecast | None:
        """Return the mean of the table rows of the previous layer's active experts.

        Returns None unless `layer` follows the layer observed last.
        """
        if self._last is None or self._last.layer != layer - 1:
            return None
        return Forecast(self._rows[layer, list(self._last.experts)].mean(0).tolist(), 0.0, 1.0)


class TokenMemory(Prediction):
    """Predicts the experts that each of the step's tokens used before; popularity for new tokens.

    Tokens are known before any layer runs, so all layers are predicted at the start of a step.
    """

    def __init__(self, geometry: Geometry) -> None:
        """Start with all experts equally likely."""
        layers, experts, top_k = geometry
        self._mean = np.full((layers, experts), top_k / experts)
        self._rows: dict[int, np.ndarray] = {}  # the latest tokens -> their chances of experts
        self._tokens: Sequence[int] = ()

    def begin_step(self, token_ids: Sequence[int]) -> None:
        """Look up the tokens; a new token starts with the mean of each layer."""
        self._tokens = token_ids
        for token in token_ids:
            row = self._rows.pop(token, None)
            self._rows[token] = self._mean.copy() if row is None else row
        # Drop the tokens that were unused for the longest time.
        while len(self._rows) > max(_MOST_TOKENS, len(token_ids)):
            del self._rows[next(iter(self._rows))]

    def observe(self, load: LayerLoad) -> None:
        """Move the layer's mean row towards the active experts.

        If the load has routes for the step's tokens, each token's own row moves towards its experts
        too.
        """
        _approach(self._mean[load.layer], load.experts, _MEAN_RATE)
        if len(load.routes) == len(self._tokens):
            for token, experts in zip(self._tokens, load.routes, strict=True):
                _approach(self._rows[token][load.layer], experts, _TOKEN_RATE)

    def predict(self, layer: int) -> Forecast | None:
        """Return the sum of the table rows of the step's tokens; None without token ids."""
        if not self._tokens:
            return None
        total = np.sum([self._rows[token][layer] for token in self._tokens], axis=0)
        return Forecast(total.tolist(), 0.0, 1.0)


def _approach(row: np.ndarray, experts: Sequence[int], rate: float) -> None:
    """Move a table row in place: towards 1 for `experts`, towards 0 for all other experts."""
    row *= 1.0 - rate
    row[list(experts)] += rate


class Hinted(Prediction):
    """Gate look-ahead: predicts the experts that the hints of one source name.

    The engine runs the next layer's router on this layer's hidden state: "gate" on the unchanged
    state (HybriMoE), "residual" after adding DALI's calibrated residual vector (equations 10 and
    11).
    """

    def __init__(self, geometry: Geometry, *, source: str) -> None:
        """Use only hints whose source is `source`."""
        self._num_experts = geometry.num_experts
        self._source = source
        self._forecasts: dict[int, Forecast] = {}
        self._calibration = Calibration()

    def begin_step(self, token_ids: Sequence[int]) -> None:
        """Drop the hints of the last step."""
        self._forecasts.clear()

    def hint(self, hint: Hint) -> None:
        """Store a hint of this source as its layer's forecast; ignore hints of other sources."""
        if hint.source != self._source:
            return
        scores = [0.0] * self._num_experts
        for expert, tokens in zip(hint.load.experts, hint.load.tokens, strict=True):
            scores[expert] = tokens
        frequencies = self._calibration.frequencies
        self._forecasts[hint.load.layer] = Forecast(scores, 0.0, 1.0, frequencies)

    def observe(self, load: LayerLoad) -> None:
        """Count how often the layer's hint came true, and drop the hint."""
        forecast = self._forecasts.pop(load.layer, None)
        if forecast is not None and self._calibration.is_due():
            self._calibration.observe(forecast, load.experts)

    def is_hinted(self, layer: int) -> bool:
        """Tell whether there is a hint for a layer."""
        return layer in self._forecasts

    def predict(self, layer: int) -> Forecast | None:
        """Return a layer's hint as a forecast; None without a hint."""
        return self._forecasts.get(layer)


class TopK(PrefetchChoice):
    """DALI's choice: the absent experts among the best, even if the link has no time for them."""

    is_staged = True

    def __init__(self, *, count: int) -> None:
        """Consider the `count` best experts."""
        self.count = count

    def choose(self, forecast: Forecast, terms: PrefetchTerms) -> list[int]:
        """Return the absent experts among the `count` best, at most `terms.room`."""
        scores = forecast.scores
        best = sorted(range(len(scores)), key=lambda expert: (-scores[expert], expert))
        absent = [e for e in best[: self.count] if terms.slots[e] < 0 and scores[e] > forecast.base]
        return absent[: terms.room]
