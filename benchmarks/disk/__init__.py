"""Measures models that are larger than memory: experts from a disk, under a memory limit."""
