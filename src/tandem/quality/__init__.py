"""What a model's answers lose against a reference's: divergence, first choices, perplexity."""
