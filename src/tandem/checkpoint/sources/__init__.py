"""Checkpoints quantised by others, read with their own codes and scales.

A source finds the weights among its files' tensors. A `StoredWeight` stands for a weight that is
not yet read, and lists the packed formats that hold it exactly.
"""
