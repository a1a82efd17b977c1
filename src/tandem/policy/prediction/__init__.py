"""Which experts the next layers will use: one protocol, one file per predictor, names in order."""

from functools import partial

from tandem.core.registry import Registry
from tandem.policy.prediction.hinted import Hinted
from tandem.policy.prediction.lag import Lag
from tandem.policy.prediction.nothing import Nothing
from tandem.policy.prediction.policy import Forecast, Prediction
from tandem.policy.prediction.popularity import Popularity
from tandem.policy.prediction.regression_predictor import RegressionPredictor
from tandem.policy.prediction.token_memory import TokenMemory
from tandem.policy.prediction.transitions import Transitions

__all__ = ["PREDICTIONS", "Forecast", "Prediction"]

PREDICTIONS: Registry[Prediction] = Registry("prediction")
PREDICTIONS.register("foresight")(RegressionPredictor)
PREDICTIONS.register("popularity")(Popularity)
PREDICTIONS.register("transitions")(Transitions)
PREDICTIONS.register("gate")(partial(Hinted, source="gate"))
PREDICTIONS.register("residual")(partial(Hinted, source="residual"))
PREDICTIONS.register("token-memory")(TokenMemory)
PREDICTIONS.register("lag")(Lag)
PREDICTIONS.register("none")(Nothing)
