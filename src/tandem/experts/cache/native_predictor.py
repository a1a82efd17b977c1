"""The regression predictor in native code, shared by planned and captured steps.

It makes the predictions of `tandem.policy.prediction.regression_predictor`, bit for bit, but
faster.
"""

from tandem.kernels import _native
from tandem.policy.lanes import ONE
from tandem.policy.plan import Geometry, Hint, LayerLoad
from tandem.policy.prediction import regression_predictor
from tandem.policy.prediction.calibration import Calibration, Counts
from tandem.policy.prediction.hint_blend import HintBlend, HintSources
from tandem.policy.prediction.policy import Forecast
from tandem.policy.regression import SUM_OFFSET


class NativePredictor:
    """Predicts layers' experts in planned steps; captured steps call `native` directly."""

    def __init__(self, geometry: Geometry) -> None:
        """Start without observations: all experts are equally likely."""
        self.native = _native.RegressionPredictor(
            geometry.num_layers,
            geometry.num_experts,
            round(ONE * regression_predictor.prior_of(geometry)),
            regression_predictor.BUCKETS,
            regression_predictor.RATE,
            regression_predictor.TOKEN_RATE,
            regression_predictor.MAX_TOKENS,
            Calibration().counts(),
            HintBlend().counts(),
        )
        self.sources = HintSources()
        self.begin_step, self.learn = self.native.begin_step, self.native.learn
        self.is_hinted = self.native.is_hinted

    def hint(self, hint: Hint) -> None:
        """Record a hint; whether it came true is counted once the layer's load is known."""
        if (factor := self.sources.factor(hint.source)) is not None:
            self.native.hint(hint.load.layer, hint.load.experts, hint.load.tokens, factor)

    def observe(self, load: LayerLoad) -> None:
        """Record a layer's load; `learn` corrects the table rows that predicted the layer."""
        self.native.observe(load.layer, load.experts, load.tokens)

    def predict(self, layer: int) -> Forecast | None:
        """Return a layer's forecast, for prefetch policies without a native form.

        Returns None if nothing is known about the layer.
        """
        if (found := self.native.forecast(layer)) is None:
            return None
        scores, chances = found
        if chances:
            return Forecast(chances, 0.0, 1.0)
        _, (seen, came_true, *_), _ = self.native.state()
        frequencies = [true / seen for true, seen in zip(came_true, seen, strict=True)]
        return Forecast(memoryview(scores).cast("I"), SUM_OFFSET, 1.0 / ONE, frequencies)

    def state(self) -> regression_predictor.PredictorState:
        """Learn from the last step; return the state kept between steps, without learned tables."""
        self.learn()
        before, counts, of_hints = self.native.state()
        return regression_predictor.PredictorState(
            [tuple(experts) for experts in before], Counts(*counts), Counts(*of_hints)
        )

    def restore(self, state: regression_predictor.PredictorState) -> None:
        """Continue from a state that another predictor's `state` returned."""
        self.native.load(*state)
