"""Checkpoints quantised by others, read with their own codes and scales.

A source finds the weights among its files' tensors. A `StoredWeight` stands for one that is still
unread, and knows which packed formats hold it exactly.
"""
