"""One expert's arithmetic: the torch reference, native CPU kernels, weight formats."""
