"""Tandem's own predictor (`regression`): transitions, last step and token memory in one regression.

Expected tokens of each expert = sum of rows: one per expert that the layer above uses now, one per
expert that the layer used one step before, one per token of the step (if token ids are known). The
rows learn from their common error (see `regression`); chances are counted (see `calibration`). If
the engine runs the next gate ahead (see `look_ahead`), its hints are blended in (see `hint_blend`).
"""

from collections.abc import Sequence
from typing import NamedTuple

from tandem.policy.lanes import ONE, Lanes
from tandem.policy.plan import Geometry, Hint, LayerLoad
from tandem.policy.prediction.calibration import Calibration, Counts
from tandem.policy.prediction.hint_blend import HintBlend
from tandem.policy.prediction.policy import Forecast, Prediction
from tandem.policy.regression import SUM_OFFSET, Regression, rate_shift, sum_rows

RATE = 0.08  # share of the error that is corrected, divided among the rows of experts
TOKEN_RATE = 1 / 8  # the same for a token's row, of the token's share of the error
BUCKETS = 1024
MAX_TOKENS = 64  # a longer step is a prompt and teaches nothing about the next one


def prior_of(geometry: Geometry) -> float:
    """Return the initial value of a row; the sum of 2 * top_k rows is top_k / num_experts."""
    return geometry.top_k / geometry.num_experts / (2 * geometry.top_k)


class PredictorState(NamedTuple):
    """What a predictor knows between steps, apart from its tables of rows."""

    before: Sequence[Sequence[int]]
    """The previous step's experts, by layer."""
    counts: Counts
    of_hints: Counts


class _Lesson(NamedTuple):
    """An observed load, with the experts whose rows took part in its prediction."""

    load: LayerLoad
    above: Sequence[int]
    before: Sequence[int]


class RegressionPredictor(Prediction):
    """Predicts the next layer at every layer, and the first layer at the start of a step.

    The predictor learns from a layer's load when `learn` is called or when the layer is predicted
    again, whichever is first. Forecasts are the same either way.
    """

    def __init__(self, geometry: Geometry) -> None:
        """Start with all experts equally likely."""
        self._tables = _Tables(geometry)
        self._before: list[tuple[int, ...]] = [()] * geometry.num_layers
        self._above: tuple[int, ...] = ()
        self._has_tokens = False
        self._lessons: dict[int, _Lesson] = {}
        self._calibration = Calibration()
        self._hints = HintBlend()

    def state(self) -> PredictorState:
        """Learn from all recorded loads; return the state between steps, without the tables."""
        self.learn()
        return PredictorState(self._before, self._calibration.counts(), self._hints.counts())

    def restore(self, state: PredictorState) -> None:
        """Continue with another predictor's state."""
        self._before = [tuple(experts) for experts in state.before]
        self._calibration.restore(state.counts)
        self._hints.restore(state.of_hints)

    def begin_step(self, token_ids: Sequence[int]) -> None:
        """Look up the tokens' rows; a token that is new to its bucket replaces the old token."""
        self.learn()  # before the previous tokens' rows are replaced
        self._above = ()
        self._hints.begin_step()
        if len(token_ids) > MAX_TOKENS:
            token_ids = ()
        self._has_tokens = len(token_ids) > 0
        self._tables.begin_step(token_ids)

    def hint(self, hint: Hint) -> None:
        """Record a hint, to be blended into the forecast of its layer."""
        self._hints.hint(hint)

    def observe(self, load: LayerLoad) -> None:
        """Record a layer's load, from which the rows that predicted it will learn."""
        layer, experts = load.layer, load.experts
        if max(load.tokens) <= MAX_TOKENS:
            self._note(load)
        self._before[layer] = experts
        self._above = experts

    def predict(self, layer: int) -> Forecast | None:
        """Return the active rows' forecast, blended with hints if any; None without active rows."""
        if not self._has_rows(layer):
            return None
        forecast = self._forecast(layer)
        if self._hints.knows(layer):
            return self._hints.blend(forecast, layer)
        return forecast

    def is_hinted(self, layer: int) -> bool:
        """Tell whether there are hints for the layer in this step."""
        return self._hints.knows(layer)

    def learn(self) -> None:
        """Learn from the loads recorded since the last call."""
        for lesson in self._lessons.values():
            self._tables.teach(*lesson)
        self._lessons.clear()

    def _has_rows(self, layer: int) -> bool:
        return bool(self._above or self._before[layer] or self._has_tokens)

    def _forecast(self, layer: int) -> Forecast:
        if layer in self._lessons:
            self._tables.teach(*self._lessons.pop(layer))
        scores = self._tables.scores(layer, self._above, self._before[layer])
        return Forecast(scores, SUM_OFFSET, 1.0 / ONE, self._calibration.frequencies)

    def _note(self, load: LayerLoad) -> None:
        """Keep a load to learn from later; count now how often its forecast and hints were true."""
        layer = load.layer
        if not self._has_rows(layer):
            return
        is_counted, levels = self._calibration.is_due(), self._hints.take(layer)
        if is_counted or levels:
            forecast = self._forecast(layer)
            if is_counted:
                self._calibration.observe(forecast, load.experts)
            if levels:
                self._hints.observe(forecast, load.experts, levels)
        if layer in self._lessons:
            self._tables.teach(*self._lessons[layer])
        self._lessons[layer] = _Lesson(load, self._above, self._before[layer])


class _Tables:
    """The regression's rows of all layers: of experts, and of tokens in hashed buckets."""

    def __init__(self, geometry: Geometry) -> None:
        """Start with all experts equally likely."""
        layers, experts = geometry.num_layers, geometry.num_experts
        self._lanes = Lanes(experts)
        self._regression = Regression(self._lanes)
        row = self._regression.row(prior_of(geometry))
        self._below = [[row] * experts for _ in range(layers)]  # [layer][expert of the layer above]
        self._after = [[row] * experts for _ in range(layers)]  # [layer][expert in the step before]
        self._blank = self._regression.row(0.0)
        self._num_layers = layers
        self._tags: list[int | None] = [None] * BUCKETS  # bucket -> its token
        self._rows_of_bucket: list[list[int]] = [[] for _ in range(BUCKETS)]
        self._token_rows: list[list[int]] = []  # [token of the step][layer]
        # Layer -> (total, rows), until it has learned.
        self._predicted: dict[int, tuple[int, int]] = {}

    def begin_step(self, token_ids: Sequence[int]) -> None:
        """Look up the tokens' rows; a token that is new to its bucket replaces the old token."""
        self._token_rows = []
        self._predicted.clear()
        for token in token_ids:
            bucket = token % BUCKETS
            if self._tags[bucket] != token:
                self._tags[bucket] = token
                self._rows_of_bucket[bucket] = [self._blank] * self._num_layers
            self._token_rows.append(self._rows_of_bucket[bucket])

    def scores(self, layer: int, above: Sequence[int], before: Sequence[int]) -> memoryview:
        """Return a layer's expected tokens by expert, times ONE, plus SUM_OFFSET."""
        self._predicted[layer] = found = self._sum(layer, above, before)
        return self._regression.read(*found)

    def teach(self, load: LayerLoad, above: Sequence[int], before: Sequence[int]) -> None:
        """Move the rows that predicted this load by a part of their error."""
        layer = load.layer
        predicted = self._predicted.pop(layer, None)
        total, num_rows = predicted or self._sum(layer, above, before)
        if max(load.tokens) == 1:
            truth = self._lanes.used(load.experts)
        else:
            unit = self._lanes.unit
            pairs = zip(load.experts, load.tokens, strict=True)
            truth = sum([unit[expert] * tokens for expert, tokens in pairs])
        truth *= ONE
        shift = rate_shift(RATE, len(above) + len(before))
        change = self._regression.change(truth, total, num_rows, shift)
        rows = self._below[layer]
        for expert in above:
            rows[expert] += change
        rows = self._after[layer]
        for expert in before:
            rows[expert] += change
        if self._token_rows:
            shift = rate_shift(TOKEN_RATE, len(self._token_rows))
            change = self._regression.change(truth, total, num_rows, shift)
            for rows in self._token_rows:
                rows[layer] += change

    def _sum(self, layer: int, above: Sequence[int], before: Sequence[int]) -> tuple[int, int]:
        """Return the sum of the active rows, and their number."""
        total = sum_rows(self._below[layer], above) + sum_rows(self._after[layer], before)
        for rows in self._token_rows:
            total += rows[layer]
        return total, len(above) + len(before) + len(self._token_rows)
