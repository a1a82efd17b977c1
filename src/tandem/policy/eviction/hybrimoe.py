"""HybriMoE's score (MRS): S = a * TopP(router scores) + (1 - a) * S; the least leaves.

The router's full softmax is not kept in traces: the top-k weights stand for TopP, the rest is 0.
"""

from collections.abc import Sequence

from tandem.policy.decay import DecayedCounts
from tandem.policy.eviction.policy import Eviction
from tandem.policy.plan import Geometry, LayerLoad


class HybriMoeScore(Eviction):
    """Keeps the experts whose routers' scores were high of late; whatever is fetched enters."""

    reads_weights = True  # of `LayerLoad`; the engine leaves them out for policies that do not
    background = "never"

    def __init__(self, geometry: Geometry, *, alpha: float = 0.5) -> None:
        """Use the released code's `alpha`."""
        self._alpha = alpha
        self._scores = DecayedCounts(geometry.num_layers, geometry.num_experts, 1.0 - alpha)

    def touch(self, load: LayerLoad) -> None:
        """Fold this step's scores in, averaged over the tokens."""
        layer, scores = load.layer, self._scores
        scores.tick(layer)
        amounts = load.weights or load.tokens
        scale = self._alpha / max(sum(amounts), 1e-9)
        for expert, amount in zip(load.experts, amounts, strict=True):
            scores.add(layer, expert, amount * scale)

    def scores(self, keys: Sequence[int]) -> list[float]:
        """Return S."""
        return self._scores.of(keys)
