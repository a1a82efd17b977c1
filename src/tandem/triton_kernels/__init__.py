"""Kernels for GPUs, in Triton; expert kernels read the packed layout in a slot directly."""
