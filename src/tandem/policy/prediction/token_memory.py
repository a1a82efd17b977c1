"""Token memory: a bounded table from token id to the experts that it was routed to, in every layer.

The token is known before any layer runs, so all layers can be predicted at the start of a step.
"""

from collections.abc import Sequence

from tandem.policy.lanes import ONE, Lanes
from tandem.policy.plan import Geometry, LayerLoad
from tandem.policy.prediction.policy import Forecast, Prediction

BUCKETS = 1024  # one token each, replaced by the next token that falls into it
SHIFT = 2  # a row moves by a quarter towards the token's experts


class TokenMemory(Prediction):
    """Predicts the experts that each of the step's tokens had before; popularity for new tokens."""

    def __init__(self, geometry: Geometry, *, buckets: int = BUCKETS) -> None:
        """Start with all experts equally likely."""
        self._lanes = Lanes(geometry.num_experts)
        prior = self._lanes.filled(geometry.top_k / geometry.num_experts)
        self._mean = [prior] * geometry.num_layers
        self._tags: list[int | None] = [None] * buckets  # whose token's each bucket is
        self._rows: list[list[int]] = [[] for _ in range(buckets)]
        self._tokens: Sequence[int] = ()

    def begin_step(self, token_ids: Sequence[int]) -> None:
        """Look the tokens up; a token that is new takes its bucket over."""
        self._tokens = token_ids
        for token in token_ids:
            bucket = token % len(self._tags)
            if self._tags[bucket] != token:
                self._tags[bucket] = token
                self._rows[bucket] = list(self._mean)

    def observe(self, load: LayerLoad) -> None:
        """Move each token's row towards its experts; needs the routes of the tokens."""
        layer, lanes = load.layer, self._lanes
        self._mean[layer] = lanes.moved(self._mean[layer], lanes.used(load.experts), 6)
        if len(load.routes) != len(self._tokens):
            return
        for token, experts in zip(self._tokens, load.routes, strict=True):
            bucket = token % len(self._tags)
            if self._tags[bucket] == token:
                rows = self._rows[bucket]
                rows[layer] = lanes.moved(rows[layer], lanes.used(experts), SHIFT)

    def predict(self, layer: int) -> Forecast | None:
        """Return the sum over the step's tokens."""
        if not self._tokens:
            return None
        buckets = len(self._tags)
        total = sum(
            self._rows[token % buckets][layer]
            for token in self._tokens
            if self._tags[token % buckets] == token
        )
        return Forecast(self._lanes.read(total), 0.0, 1.0 / ONE)
