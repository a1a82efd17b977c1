"""Compares a model's answers with a reference's: divergence, first choices, perplexity."""
