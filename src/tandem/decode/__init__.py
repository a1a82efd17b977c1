"""The decode engine: one model, many sequences, step by step."""
