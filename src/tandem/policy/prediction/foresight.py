"""Tandem's own prediction: transitions, the step before and the token's memory in one regression.

Expected tokens of each expert = sum of rows: one per expert that the layer above uses now, one per
expert that the layer used one step before, one per token of the step (if token ids are known). The
rows learn from their common error (see `regression`); chances are counted (see `calibration`).
Where the engine looks ahead with the next gate, its hints join in (see `look_ahead`).
"""

from collections.abc import Sequence
from typing import NamedTuple

from tandem.policy.lanes import ONE, Lanes
from tandem.policy.plan import Geometry, Hint, LayerLoad
from tandem.policy.prediction.calibration import Calibration
from tandem.policy.prediction.look_ahead import LookAhead
from tandem.policy.prediction.policy import Forecast
from tandem.policy.regression import SUM_OFFSET, Regression, rate_shift, sum_rows

RATE = 0.08  # of the error, shared by the rows of experts
TOKEN_SHIFT = 3  # a token's row takes an eighth of its token's share of the error
BUCKETS = 1024
MAX_TOKENS = 64  # above, a step is a prompt and teaches nothing about the next


class _Lesson(NamedTuple):
    """A load that came out, with the rows that had a share in foreseeing it."""

    load: LayerLoad
    above: Sequence[int]
    before: Sequence[int]
    token_rows: list[list[int]]
    foreseen: tuple[int, int] | None  # total, number of rows; None: nobody asked


class Foresight:
    """Foresees the next layer at every layer, and the first layer at the start of a step.

    A layer's lesson is learned when `learn` is called or the layer is foreseen again: when that is
    changes no forecast.
    """

    def __init__(self, geometry: Geometry) -> None:
        """Start with all experts equally likely."""
        layers, experts = geometry.num_layers, geometry.num_experts
        self._lanes = Lanes(experts)
        self._regression = Regression(self._lanes)
        share = geometry.top_k / experts
        row = self._regression.row(share / (2 * geometry.top_k))
        self._below = [[row] * experts for _ in range(layers)]  # by expert of the layer above
        self._after = [[row] * experts for _ in range(layers)]  # by expert of the step before
        self._blank = self._regression.row(0.0)
        self._num_layers = layers
        self._tags = [-1] * BUCKETS
        self._rows_of_bucket: list[list[int]] = [[] for _ in range(BUCKETS)]
        self._before: list[tuple[int, ...]] = [()] * layers
        self._token_rows: list[list[int]] = []  # of the step's tokens, each by layer
        self._above: tuple[int, ...] = ()
        self._foreseen: tuple[int, int, int] | None = None  # layer, total, rows
        self._lessons: dict[int, _Lesson] = {}
        self._calibration = Calibration()
        self._look_ahead = LookAhead()

    def begin_step(self, token_ids: Sequence[int]) -> None:
        """Find the tokens' rows; a token that is new takes its bucket over."""
        self._above = ()
        self._foreseen = None
        self._token_rows = []
        self._look_ahead.begin_step()
        if len(token_ids) > MAX_TOKENS:
            return
        for token in token_ids:
            bucket = token % BUCKETS
            if self._tags[bucket] != token:
                self._tags[bucket] = token
                self._rows_of_bucket[bucket] = [self._blank] * self._num_layers
            self._token_rows.append(self._rows_of_bucket[bucket])

    def hint(self, hint: Hint) -> None:
        """Keep what a gate ahead says; what it is worth is counted."""
        self._look_ahead.hint(hint)

    def observe(self, load: LayerLoad) -> None:
        """Note a lesson for the rows that foresaw this layer."""
        layer, experts = load.layer, load.experts
        if max(load.tokens) <= MAX_TOKENS:
            self._note(load)
        self._before[layer] = experts
        self._above = experts
        self._foreseen = None

    def predict(self, layer: int) -> Forecast | None:
        """Return the sum of the active rows, blended with hints where there are any."""
        total, num_rows = self._sum(layer)
        self._foreseen = (layer, total, num_rows)
        if not num_rows:
            return None
        forecast = self._forecast(total, num_rows)
        if self._look_ahead.knows(layer):
            return self._look_ahead.blend(forecast, layer)
        return forecast

    def learn(self) -> None:
        """Learn the lessons noted since the last call."""
        for lesson in self._lessons.values():
            self._learn(lesson)
        self._lessons.clear()

    def _sum(self, layer: int) -> tuple[int, int]:
        """Return the sum of a layer's active rows, and how many they are."""
        if layer in self._lessons:
            self._learn(self._lessons.pop(layer))
        above, before = self._above, self._before[layer]
        return self._sum_of(layer, above, before, self._token_rows)

    def _sum_of(
        self,
        layer: int,
        above: Sequence[int],
        before: Sequence[int],
        token_rows: Sequence[list[int]],
    ) -> tuple[int, int]:
        total = sum_rows(self._below[layer], above) + sum_rows(self._after[layer], before)
        for rows in token_rows:
            total += rows[layer]
        return total, len(above) + len(before) + len(token_rows)

    def _forecast(self, total: int, num_rows: int) -> Forecast:
        scores = self._regression.read(total, num_rows)
        return Forecast(scores, SUM_OFFSET, 1.0 / ONE, self._calibration.frequencies)

    def _note(self, load: LayerLoad) -> None:
        """Keep a lesson for later; what is counted, is counted now."""
        layer, foreseen, before = load.layer, None, self._before[load.layer]
        if not (self._above or before or self._token_rows):
            return
        if self._foreseen is not None and self._foreseen[0] == layer:
            foreseen = self._foreseen[1:]
        is_counted, levels = self._calibration.is_due(), self._look_ahead.take(layer)
        if is_counted or levels:
            foreseen = foreseen or self._sum(layer)
            forecast = self._forecast(*foreseen)
            if is_counted:
                self._calibration.observe(forecast, load.experts)
            if levels:
                self._look_ahead.observe(forecast, load.experts, levels)
        if layer in self._lessons:
            self._learn(self._lessons[layer])
        self._lessons[layer] = _Lesson(load, self._above, before, self._token_rows, foreseen)

    def _learn(self, lesson: _Lesson) -> None:
        """Move the rows that had a share in a foresight by a part of its error."""
        load, above, before, token_rows, foreseen = lesson
        layer = load.layer
        total, num_rows = foreseen or self._sum_of(layer, above, before, token_rows)
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
        if token_rows:
            shift = rate_shift(2.0**-TOKEN_SHIFT, len(token_rows))
            change = self._regression.change(truth, total, num_rows, shift)
            for rows in token_rows:
                rows[layer] += change
