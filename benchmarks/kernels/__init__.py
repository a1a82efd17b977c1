"""Benchmarks of the native kernels, and of other systems' kernels."""
