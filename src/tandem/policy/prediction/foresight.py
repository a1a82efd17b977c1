"""Tandem's own prediction: transitions, the step before and the token's memory in one regression.

Expected tokens of each expert = sum of rows: one per expert that the layer above uses now, one per
expert that the layer used one step before, one per token of the step (if token ids are known). The
rows learn from their common error (see `regression`); chances are counted (see `calibration`).
"""

from collections.abc import Sequence

from tandem.policy.lanes import ONE, Lanes
from tandem.policy.plan import Geometry, Hint, LayerLoad
from tandem.policy.prediction.calibration import Calibration
from tandem.policy.prediction.policy import Forecast
from tandem.policy.regression import SUM_OFFSET, Regression, rate_shift, sum_rows

RATE = 0.08  # of the error, shared by the rows of experts
TOKEN_SHIFT = 3  # a token's row takes an eighth of its token's share of the error
BUCKETS = 1024
MAX_TOKENS = 64  # above, a step is a prompt and teaches nothing about the next


class Foresight:
    """Foresees the next layer at every layer, and the first layer at the start of a step."""

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
        self._token_rows: list[list[int]] = [[] for _ in range(BUCKETS)]
        self._before: list[tuple[int, ...]] = [()] * layers
        self._buckets: list[int] = []
        self._above: tuple[int, ...] = ()
        self._foreseen: tuple[int, int, int] | None = None  # layer, total, rows
        self._calibration = Calibration()

    def begin_step(self, token_ids: Sequence[int]) -> None:
        """Find the tokens' rows; a token that is new takes its bucket over."""
        self._above = ()
        self._foreseen = None
        self._buckets = []
        if len(token_ids) > MAX_TOKENS:
            return
        for token in token_ids:
            bucket = token % BUCKETS
            if self._tags[bucket] != token:
                self._tags[bucket] = token
                self._token_rows[bucket] = [self._blank] * self._num_layers
            self._buckets.append(bucket)

    def hint(self, hint: Hint) -> None:
        """Need nothing: no gate has to run."""

    def observe(self, load: LayerLoad) -> None:
        """Teach the rows that foresaw this layer."""
        layer, experts = load.layer, load.experts
        self._learn(load)
        self._before[layer] = experts
        self._above = experts
        self._foreseen = None

    def predict(self, layer: int) -> Forecast | None:
        """Return the sum of the active rows."""
        total, num_rows = self._sum(layer)
        self._foreseen = (layer, total, num_rows)
        return self._forecast(total, num_rows) if num_rows else None

    def _sum(self, layer: int) -> tuple[int, int]:
        """Return the sum of a layer's active rows, and how many they are."""
        above, before, buckets = self._above, self._before[layer], self._buckets
        total = sum_rows(self._below[layer], above) + sum_rows(self._after[layer], before)
        for bucket in buckets:
            total += self._token_rows[bucket][layer]
        return total, len(above) + len(before) + len(buckets)

    def _forecast(self, total: int, num_rows: int) -> Forecast:
        scores = self._regression.read(total, num_rows)
        return Forecast(scores, SUM_OFFSET, 1.0 / ONE, self._calibration.frequencies)

    def _learn(self, load: LayerLoad) -> None:
        layer, most = load.layer, max(load.tokens)
        if most > MAX_TOKENS:
            return
        if self._foreseen is not None and self._foreseen[0] == layer:
            _, total, num_rows = self._foreseen
        else:  # nobody asked, but the rows learn all the same
            total, num_rows = self._sum(layer)
        if not num_rows:
            return
        if most == 1:
            truth = self._lanes.used(load.experts)
        else:
            unit = self._lanes.unit
            pairs = zip(load.experts, load.tokens, strict=True)
            truth = sum([unit[expert] * tokens for expert, tokens in pairs])
        truth *= ONE
        if self._calibration.is_due():
            self._calibration.observe(self._forecast(total, num_rows), load.experts)
        before = self._before[layer]
        shift = rate_shift(RATE, len(self._above) + len(before))
        change = self._regression.change(truth, total, num_rows, shift)
        below, after = self._below[layer], self._after[layer]
        for expert in self._above:
            below[expert] += change
        for expert in before:
            after[expert] += change
        if self._buckets:
            shift = rate_shift(2.0**-TOKEN_SHIFT, len(self._buckets))
            change = self._regression.change(truth, total, num_rows, shift)
            for bucket in self._buckets:
                self._token_rows[bucket][layer] += change
