"""Predictions and prefetches of papers, with which Tandem's are compared; no run has them.

They join the names of `tandem.policy` when `tandem.sim` is imported.
"""

from collections.abc import Sequence
from functools import partial

import numpy as np

from tandem.policy.decay import DecayedCounts
from tandem.policy.plan import Geometry, Hint, LayerLoad
from tandem.policy.prediction import PREDICTIONS
from tandem.policy.prediction.calibration import Calibration
from tandem.policy.prediction.policy import Forecast, Prediction
from tandem.policy.prefetch import PREFETCHES, PrefetchChoice, PrefetchTerms

_POPULARITY_DECAY = 0.995
_TRANSITION_RATE = 1 / 32  # of the way towards what followed
_TOKEN_RATE, _MEAN_RATE = 1 / 4, 1 / 64
_MOST_TOKENS = 1024


@PREDICTIONS.register("popularity")
class Popularity(Prediction):
    """Predicts what a layer has used most (EdgeMoE's statistics): the decayed mean load."""

    def __init__(self, geometry: Geometry) -> None:
        """Start with nothing seen."""
        self._num_experts = geometry.num_experts
        layers, experts = geometry.num_layers, geometry.num_experts
        self._counts = DecayedCounts(layers, experts, _POPULARITY_DECAY)
        self._weight = [0.0] * layers

    def observe(self, load: LayerLoad) -> None:
        """Add a layer's load."""
        layer = load.layer
        self._counts.tick(layer)
        self._weight[layer] = self._weight[layer] * _POPULARITY_DECAY + 1.0
        for expert, tokens in zip(load.experts, load.tokens, strict=True):
            self._counts.add(layer, expert, tokens)

    def predict(self, layer: int) -> Forecast | None:
        """Return the mean load."""
        if not self._weight[layer]:
            return None
        first = layer * self._num_experts
        scores = self._counts.raw[first : first + self._num_experts]
        return Forecast(scores, 0.0, 1.0 / (self._counts.unit[layer] * self._weight[layer]))


@PREDICTIONS.register("transitions")
class Transitions(Prediction):
    """Predicts the mean of what followed each expert that the layer above uses now."""

    def __init__(self, geometry: Geometry) -> None:
        """Start with all experts equally likely."""
        layers, experts, top_k = geometry
        self._rows = np.full((layers, experts, experts), top_k / experts)
        self._last: LayerLoad | None = None

    def begin_step(self, token_ids: Sequence[int]) -> None:
        """Start above the first layer."""
        self._last = None

    def observe(self, load: LayerLoad) -> None:
        """Move the rows of the layer above towards this load."""
        if self._last is not None and self._last.layer == load.layer - 1:
            used = np.zeros(self._rows.shape[2])
            used[list(load.experts)] = 1.0
            above, rows = list(self._last.experts), self._rows[load.layer]
            rows[above] += _TRANSITION_RATE * (used - rows[above])
        self._last = load

    def predict(self, layer: int) -> Forecast | None:
        """Return the mean of the active rows; only of the layer below the last observed."""
        if self._last is None or self._last.layer != layer - 1:
            return None
        return Forecast(self._rows[layer, list(self._last.experts)].mean(0).tolist(), 0.0, 1.0)


@PREDICTIONS.register("token-memory")
class TokenMemory(Prediction):
    """Predicts the experts that each of the step's tokens had before; popularity for new tokens.

    Tokens are known before any layer runs, so all layers are predicted at the start of a step.
    """

    def __init__(self, geometry: Geometry) -> None:
        """Start with all experts equally likely."""
        layers, experts, top_k = geometry
        self._mean = np.full((layers, experts), top_k / experts)
        self._rows: dict[int, np.ndarray] = {}  # by token, the latest ones
        self._tokens: Sequence[int] = ()

    def begin_step(self, token_ids: Sequence[int]) -> None:
        """Look the tokens up; a new one begins with what layers use on average."""
        self._tokens = token_ids
        for token in token_ids:
            row = self._rows.pop(token, None)
            self._rows[token] = self._mean.copy() if row is None else row
        while len(self._rows) > max(_MOST_TOKENS, len(token_ids)):  # the longest unused goes
            del self._rows[next(iter(self._rows))]

    def observe(self, load: LayerLoad) -> None:
        """Move each token's row towards its experts; needs the routes of the tokens."""
        _approach(self._mean[load.layer], load.experts, _MEAN_RATE)
        if len(load.routes) == len(self._tokens):
            for token, experts in zip(self._tokens, load.routes, strict=True):
                _approach(self._rows[token][load.layer], experts, _TOKEN_RATE)

    def predict(self, layer: int) -> Forecast | None:
        """Return the sum over the step's tokens."""
        if not self._tokens:
            return None
        total = np.sum([self._rows[token][layer] for token in self._tokens], axis=0)
        return Forecast(total.tolist(), 0.0, 1.0)


def _approach(row: np.ndarray, experts: Sequence[int], rate: float) -> None:
    """Move a row in place towards 1 for these experts and 0 for the others."""
    row *= 1.0 - rate
    row[list(experts)] += rate


class Hinted(Prediction):
    """Gate look-ahead: predicts what hints of one source say.

    The engine asks the next routers with the hidden state of this layer: "gate" as it is
    (HybriMoE), "residual" after adding DALI's calibrated residual vector (equations 10 and 11).
    """

    def __init__(self, geometry: Geometry, *, source: str) -> None:
        """Listen to hints of `source`."""
        self._num_experts = geometry.num_experts
        self._source = source
        self._forecasts: dict[int, Forecast] = {}
        self._calibration = Calibration()

    def begin_step(self, token_ids: Sequence[int]) -> None:
        """Forget the hints of the step before."""
        self._forecasts.clear()

    def hint(self, hint: Hint) -> None:
        """Keep a hint of the right source."""
        if hint.source != self._source:
            return
        scores = [0.0] * self._num_experts
        for expert, tokens in zip(hint.load.experts, hint.load.tokens, strict=True):
            scores[expert] = tokens
        frequencies = self._calibration.frequencies
        self._forecasts[hint.load.layer] = Forecast(scores, 0.0, 1.0, frequencies)

    def observe(self, load: LayerLoad) -> None:
        """Count how the hint came out."""
        forecast = self._forecasts.pop(load.layer, None)
        if forecast is not None and self._calibration.is_due():
            self._calibration.observe(forecast, load.experts)

    def is_hinted(self, layer: int) -> bool:
        """Tell whether there is a hint."""
        return layer in self._forecasts

    def predict(self, layer: int) -> Forecast | None:
        """Return the hint of a layer."""
        return self._forecasts.get(layer)


PREDICTIONS.register("gate")(partial(Hinted, source="gate"))
PREDICTIONS.register("residual")(partial(Hinted, source="residual"))


@PREFETCHES.register("top-k")
class TopK(PrefetchChoice):
    """DALI's choice: whatever of the k best is absent, whether or not the link has time for it."""

    is_staged = True

    def __init__(self, *, count: int) -> None:
        """Look at the `count` best."""
        self._count = count

    def choose(self, forecast: Forecast, terms: PrefetchTerms) -> list[int]:
        """Return the absent ones among the experts with the highest predicted workload."""
        scores = forecast.scores
        best = sorted(range(len(scores)), key=lambda expert: (-scores[expert], expert))
        absent = [
            e for e in best[: self._count] if terms.slots[e] < 0 and scores[e] > forecast.base
        ]
        return absent[: terms.room]
