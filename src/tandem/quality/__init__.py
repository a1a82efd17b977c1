"""Compares a model's predictions with a reference's: divergence, first choices, perplexity."""
