"""Runs the next layer's router ahead, to predict its choice."""
