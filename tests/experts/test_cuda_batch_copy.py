"""Tests of the driver's batched copy: the arguments of a function with the driver's signature."""

import ctypes
from types import SimpleNamespace
from typing import Any

import torch

from tandem.devices.cuda.batch_copy import (
    LEAST_BYTES,
    AddressRanges,
    BatchCopy,
    CopyEntry,
    find_batch_copy,
    is_worth_a_batch,
)
from tests.experts.driver_library import FakeDriver

POINTER, SIZE = ctypes.POINTER(ctypes.c_void_p), ctypes.POINTER(ctypes.c_size_t)
# CUresult cuMemcpyBatchAsync(CUdeviceptr*, CUdeviceptr*, size_t*, size_t count,
#     CUmemcpyAttributes*, size_t* attrsIdxs, size_t numAttrs, size_t* failIdx, CUstream)
DRIVER = ctypes.CFUNCTYPE(
    ctypes.c_int, POINTER, POINTER, SIZE, ctypes.c_size_t, ctypes.c_void_p,
    SIZE, ctypes.c_size_t, SIZE, ctypes.c_void_p,
)  # fmt: skip


def entry(target: torch.Tensor, source: torch.Tensor) -> CopyEntry:
    return CopyEntry(target.data_ptr(), source.data_ptr(), source.nbytes)


def test_the_driver_is_given_every_copy_and_one_set_of_attributes() -> None:
    seen: dict[str, Any] = {}

    def copy(*args: Any) -> int:
        targets, sources, sizes, count, attributes, first, num_attributes, _, stream = args
        for i in range(count):
            ctypes.memmove(targets[i], sources[i], sizes[i])
        # Access order, two empty hints, flags: 24 bytes as in cuda.h.
        seen.update(
            attributes=list((ctypes.c_int32 * 6).from_address(attributes)),
            first=first[0],
            number=num_attributes,
        )
        seen.update(stream=stream)
        return 0

    sources = [torch.randint(256, (size,), dtype=torch.uint8) for size in (10, 300, 7)]
    targets = [torch.zeros_like(source) for source in sources]
    batch = BatchCopy(DRIVER(copy))
    entries = [entry(target, source) for target, source in zip(targets, sources, strict=True)]
    assert batch(entries, 0x7F00) == 0
    for target, source in zip(targets, sources, strict=True):
        assert torch.equal(target, source)
    assert seen == {"attributes": [1, 0, 0, 0, 0, 1], "first": 0, "number": 1, "stream": 0x7F00}


def test_a_refusal_is_the_drivers_code() -> None:
    assert BatchCopy(DRIVER(lambda *args: 801))([CopyEntry(1, 1, 1)], 2) == 801


def test_the_version_is_requested_whose_signature_is_meant() -> None:
    """CUDA 13 has another function of this name; dlsym returns whichever was first."""
    driver = FakeDriver()
    driver.functions["cuMemcpyBatchAsync", 12080] = DRIVER(lambda *args: 0)
    batch = find_batch_copy(lambda name: driver)
    assert batch is not None
    target, source = torch.zeros(8, dtype=torch.uint8), torch.ones(8, dtype=torch.uint8)
    assert batch([entry(target, source)], 0x7F00) == 0


def test_without_a_driver_or_with_an_old_one_there_is_none() -> None:
    def missing(name: str) -> Any:
        raise OSError(f"{name}: cannot open shared object file")

    assert find_batch_copy(missing) is None
    assert find_batch_copy(lambda name: SimpleNamespace()) is None
    assert find_batch_copy(lambda name: FakeDriver()) is None


def test_small_entries_and_single_copies_go_by_themselves() -> None:
    large, small = CopyEntry(1, 1, LEAST_BYTES), CopyEntry(1, 1, LEAST_BYTES - 1)
    assert is_worth_a_batch([large, large])
    assert not is_worth_a_batch([large])
    assert not is_worth_a_batch([large, small])


def test_ranges_hold_what_lies_in_one_of_them() -> None:
    ranges = AddressRanges()
    assert not ranges.holds(0, 1)
    for begin in (300, 100, 200):
        ranges.add(begin, 50)
    assert ranges.holds(100, 50)
    assert ranges.holds(349, 1)
    for address, num_bytes in ((99, 2), (100, 51), (149, 2), (150, 1), (350, 1), (0, 400)):
        assert not ranges.holds(address, num_bytes)
    ranges.remove(200)
    assert not ranges.holds(200, 1)
    assert ranges.holds(300, 50)
