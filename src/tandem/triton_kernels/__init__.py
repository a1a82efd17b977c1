"""Expert kernels for GPUs, in Triton: they read the packed layout as it lies in a slot."""
