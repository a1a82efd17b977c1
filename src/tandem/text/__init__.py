"""Tokenizers and chat templates that came with a model: checked, and kept within bounds."""
