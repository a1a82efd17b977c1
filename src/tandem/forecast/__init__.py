"""Forecasts a model's memory and speed before it is loaded."""
