"""Benchmarks of the native kernels beside what else a model runs."""
