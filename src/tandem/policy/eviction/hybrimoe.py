"""HybriMoE's score (MRS): S = a * TopP(router scores) + (1 - a) * S; the least leaves.

The router's full softmax is not kept in traces: the top-k weights stand for TopP, the rest is 0.
"""

from collections.abc import Sequence

from tandem.policy.decay import DecayedCounts
from tandem.policy.plan import Geometry, LayerLoad


class HybriMoeScore:
    """Keeps the experts whose routers' scores were high of late; whatever is fetched enters."""

    reads_weights = True  # of `LayerLoad`; the engine leaves them out for policies that do not
    background = "never"

    def __init__(self, geometry: Geometry, *, alpha: float = 0.5) -> None:
        """Use the released code's `alpha`."""
        self._alpha = alpha
        self._scores = DecayedCounts(geometry.num_layers, geometry.num_experts, 1.0 - alpha)

    def begin_step(self, *, is_prefill: bool) -> None:
        """No-op."""

    def touch(self, load: LayerLoad) -> None:
        """Fold this step's scores in, averaged over the tokens."""
        layer, scores = load.layer, self._scores
        scores.tick(layer)
        amounts = load.weights or load.tokens
        scale = self._alpha / max(sum(amounts), 1e-9)
        for expert, amount in zip(load.experts, amounts, strict=True):
            scores.add(layer, expert, amount * scale)

    def candidates(
        self, layer: int, misses: Sequence[int], slot_of: Sequence[int]
    ) -> Sequence[int]:
        """Return every miss."""
        return misses

    def scores(self, keys: Sequence[int]) -> list[float]:
        """Return S."""
        return self._scores.of(keys)

    def admits(self, newcomer: float, victim: float) -> bool:
        """Admit always."""
        return True

    def inserted(self, key: int) -> None:
        """No-op."""
