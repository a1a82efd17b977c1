"""Predicts which experts the next layers will use: one protocol, and its predictors by name."""

from tandem.core.registry import Registry
from tandem.policy.prediction.policy import Forecast, NoPrediction, Prediction
from tandem.policy.prediction.regression_predictor import RegressionPredictor

__all__ = ["PREDICTIONS", "Forecast", "Prediction", "RegressionPredictor"]

PREDICTIONS: Registry[Prediction] = Registry("prediction")
PREDICTIONS.register("regression", formerly="foresight")(RegressionPredictor)
PREDICTIONS.register("none")(NoPrediction)
