"""Expert kernels for GPUs, in Triton; they read the packed layout in a slot directly."""
