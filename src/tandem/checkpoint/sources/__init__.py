"""Checkpoints quantised by others (sources), read with their own codes and scales.

The module of each method finds the quantised weights among a checkpoint's tensors. A `StoredWeight`
stands for a weight that is not yet read, and lists the packed formats that hold it exactly.
"""
