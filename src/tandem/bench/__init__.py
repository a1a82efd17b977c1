"""Measures kernels and whole models against the ceilings of this machine."""
