"""Measures models that are larger than the memory: experts from a disk, under a memory limit."""
