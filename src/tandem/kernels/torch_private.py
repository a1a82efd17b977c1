"""The private parts of torch that Tandem calls: nothing else in Tandem does."""

from typing import Any

import torch


def end_allocation_to_pool(device_idx: int, pool: Any) -> None:
    """Let the CUDA allocator leave a graph's pool, if torch can say so (2.11 to today can).

    Stands in for what `CUDAGraph.capture_end` leaves out when it raises; raises `RuntimeError`
    where the allocator has left the pool or never allocated to it.
    """
    end = getattr(torch._C, "_cuda_endAllocateToPool", None)
    if end is not None:
        end(device_idx, pool)
