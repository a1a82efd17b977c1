"""Keys and values of sequences, on the CPU and on CUDA."""
