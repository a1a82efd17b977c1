"""Tensors as rows that lie evenly apart."""

from torch import Tensor


def row_stride(x: Tensor) -> int | None:
    """Return how many values apart the rows of the last dimension are; None if not evenly."""
    if x.stride(-1) != 1:
        return None
    try:
        return x.view(-1, x.shape[-1]).stride(0)
    except RuntimeError:  # no such view
        return None
