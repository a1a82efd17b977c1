"""Memory for a call's fp32 rows, reused from call to call, on the host or a device.

A new allocation of megabytes costs a page fault for every 4 KB: a tenth of a long prompt's time.
"""

from collections.abc import Callable

import torch
from torch import Tensor


class RowMemory:
    """Returns the same memory for each call, as large as the largest call so far."""

    def __init__(self, allocate: Callable[[int], Tensor] = torch.empty) -> None:
        """Get memory from `allocate`, which takes a number of fp32 values and returns a tensor."""
        self._allocate = allocate
        self._memory: Tensor | None = None
        # The latest result, because every decode step asks for the same.
        self._view: Tensor | None = None

    def __call__(self, num_rows: int, width: int) -> Tensor:
        """Return uninitialised memory (num_rows, width) fp32; the next call reuses it."""
        view = self._view
        if view is not None and view.shape == (num_rows, width):
            return view
        count = num_rows * width
        if self._memory is None or self._memory.numel() < count:
            with torch.inference_mode(False):  # else only inference mode could write to it
                self._memory = self._allocate(count)
        self._view = self._memory[:count].view(num_rows, width)
        return self._view

    def holds(self, rows: Tensor) -> bool:
        """Tell whether `rows` is a view of the present memory."""
        memory = self._memory
        return memory is not None and (
            rows.untyped_storage().data_ptr() == memory.untyped_storage().data_ptr()
        )

    def forget(self) -> None:
        """Give up the present memory, to which a failed call may still write."""
        self._memory = self._view = None
