"""Measures the hybrid runtime on a GPU."""
