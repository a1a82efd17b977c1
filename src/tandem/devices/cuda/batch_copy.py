"""Queues several copies to a GPU in one driver call, at a fifth of the host time of single calls.

Needs a driver of CUDA 12.8 or newer; with an older driver the caller queues copies one by one.
"""

import bisect
import ctypes
from collections.abc import Callable, Sequence
from typing import NamedTuple

from tandem.devices.cuda.driver import Function, open_driver

# With smaller entries the driver may run the whole batch before it returns.
LEAST_BYTES = 256 << 10
# CU_MEMCPY_SRC_ACCESS_ORDER_STREAM, CU_MEMCPY_FLAG_PREFER_OVERLAP_WITH_COMPUTE
_IN_STREAM_ORDER, _OVERLAPS_COMPUTE = 1, 1

_VERSION = 12080
_POINTERS, _SIZES = ctypes.POINTER(ctypes.c_void_p), ctypes.POINTER(ctypes.c_size_t)


class CopyEntry(NamedTuple):
    """Bytes to copy from one address to another."""

    target: int
    source: int
    num_bytes: int


class AddressRanges:
    """Ranges of addresses that do not overlap."""

    def __init__(self) -> None:
        """Start without ranges."""
        self._begins: list[int] = []
        self._ends: dict[int, int] = {}  # by begin

    def add(self, begin: int, num_bytes: int) -> None:
        """Add a range; it must not begin where another one does."""
        bisect.insort(self._begins, begin)
        self._ends[begin] = begin + num_bytes

    def remove(self, begin: int) -> None:
        """Remove the range that begins at `begin`."""
        del self._ends[begin]
        self._begins.remove(begin)

    def holds(self, address: int, num_bytes: int) -> bool:
        """Tell whether one range contains all bytes from `address` on."""
        at = bisect.bisect_right(self._begins, address)
        return at > 0 and address + num_bytes <= self._ends[self._begins[at - 1]]


class _Attributes(ctypes.Structure):
    """`CUmemcpyAttributes`; the locations are hints for managed memory only."""

    _fields_ = (
        ("source_access_order", ctypes.c_int),
        ("source_location", ctypes.c_int * 2),
        ("target_location", ctypes.c_int * 2),
        ("flags", ctypes.c_uint),
    )


class BatchCopy:
    """Queues several copies by one call of the driver's `cuMemcpyBatchAsync`."""

    def __init__(self, function: Function) -> None:
        """Take the driver's function, which takes C types and returns the driver's code."""
        self._function = function

    def __call__(self, entries: Sequence[CopyEntry], stream: int) -> int:
        """Queue copies on a stream; return the driver's code, 0 on success.

        The stream must not be the default stream, and host memory must be pinned. Entries may be
        copied in any order.
        """
        count = len(entries)
        pointers, sizes = ctypes.c_void_p * count, ctypes.c_size_t * count
        attributes = _Attributes(source_access_order=_IN_STREAM_ORDER, flags=_OVERLAPS_COMPUTE)
        first_of_attributes, failed = ctypes.c_size_t(0), ctypes.c_size_t(0)
        return self._function(
            pointers(*[entry.target for entry in entries]),
            pointers(*[entry.source for entry in entries]),
            sizes(*[entry.num_bytes for entry in entries]),
            ctypes.c_size_t(count),
            ctypes.byref(attributes),
            ctypes.byref(first_of_attributes),
            ctypes.c_size_t(1),
            ctypes.byref(failed),
            ctypes.c_void_p(stream),
        )


def find_batch_copy(load: Callable[[str], object] = ctypes.CDLL) -> BatchCopy | None:
    """Return the driver's batched copy; None if there is no driver of CUDA 12.8 or newer."""
    driver = open_driver(load)
    # The version of CUDA 12.8; that of 13.0 has the same name and one argument less.
    function = driver and driver.find(
        "cuMemcpyBatchAsync", _VERSION, _POINTERS, _POINTERS, _SIZES, ctypes.c_size_t,
        ctypes.c_void_p, _SIZES, ctypes.c_size_t, _SIZES, ctypes.c_void_p,
    )  # fmt: skip
    return BatchCopy(function) if function else None


def is_worth_a_batch(entries: Sequence[CopyEntry]) -> bool:
    """Tell whether one batched call copies faster than single calls and returns without waiting."""
    return len(entries) > 1 and all(entry.num_bytes >= LEAST_BYTES for entry in entries)
