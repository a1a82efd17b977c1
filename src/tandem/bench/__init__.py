"""Measures: the kernels against the machine's ceilings. Prints the ceiling first, JSON last."""
