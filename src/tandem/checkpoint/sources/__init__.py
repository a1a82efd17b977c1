"""Checkpoints that others have quantised: their codes and scales, as they are.

A source finds the weights among the tensors of its files; a `StoredWeight` stands for one of them,
unread, and knows which packed formats hold it exactly.
"""
