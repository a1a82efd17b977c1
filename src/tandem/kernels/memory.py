"""Memory for packed weights, on huge pages where the system has them.

With pages of 4 KiB, reading weights at the speed of memory costs a walk through the page table
every 4 KiB. Matrices of a few megabytes share chunks, because a huge page has two megabytes.
"""

import threading

import numpy as np
import torch
from torch import Tensor

from tandem.kernels import _native
from tandem.kernels.formats.weight_format import SECTION_ALIGNMENT_BYTES, aligned

_CHUNK_BYTES = 64 << 20

_lock = threading.Lock()
_rest = torch.empty(0, dtype=torch.uint8, device="cpu")  # of the newest chunk


def allocate(num_bytes: int) -> Tensor:
    """Return uninitialised memory, (num_bytes,) uint8, on huge pages if there are any.

    Small pieces share a chunk, which is freed once none of them is in use.
    """
    global _rest
    rounded = aligned(num_bytes)
    if rounded > _CHUNK_BYTES // 2:
        return _new_chunk(rounded)[:num_bytes]
    with _lock:
        if rounded > len(_rest):
            _rest = _new_chunk(_CHUNK_BYTES)
        memory, _rest = _rest[:num_bytes], _rest[rounded:]
    return memory


def allocate_buffers(num_experts: int, num_bytes: int, *, has_huge_pages: bool = True) -> Tensor:
    """Return zeroed buffers (num_experts, num_bytes) uint8; pages are allocated on first use."""
    size = num_experts * num_bytes
    with torch.inference_mode(False):
        memory = torch.from_numpy(np.zeros(size + SECTION_ALIGNMENT_BYTES, np.uint8))
    first = -memory.data_ptr() % SECTION_ALIGNMENT_BYTES
    return _advised(memory[first : first + size], has_huge_pages).view(num_experts, num_bytes)


def _new_chunk(num_bytes: int) -> Tensor:
    with torch.inference_mode(False):
        return _advised(torch.empty(num_bytes, dtype=torch.uint8, device="cpu"))


def _advised(chunk: Tensor, has_huge_pages: bool = True) -> Tensor:
    if has_huge_pages:
        _native.advise_huge_pages(chunk)
    return chunk
