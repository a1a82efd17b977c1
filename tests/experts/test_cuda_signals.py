"""Tests of stream-ordered writes and waits, and of kernel time limits: the calls of the driver."""

import ctypes
from typing import Any

import pytest
import torch

from tandem.devices.cuda.driver import Driver, DriverError
from tandem.devices.cuda.signals import (
    LONGEST_SECONDS,
    WATCHED_SECONDS,
    StreamSignals,
    longest_wait,
)
from tandem.experts.execution.captured_steps import PATIENCE_SECONDS
from tests.experts.driver_library import FakeDriver

# CUresult cuStreamWriteValue32(CUstream, CUdeviceptr, cuuint32_t, unsigned int), and the wait alike
OPERATION = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint32, ctypes.c_uint
)
ADDRESS = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.POINTER(ctypes.c_uint64), ctypes.c_void_p, ctypes.c_uint
)
NOT_SUPPORTED = 801
WORD, OFFSET, STREAM = torch.zeros(1, dtype=torch.int32), 0x2_0000_0000_1000, 0x5500


def seen_at(found: Any, host: int, flags: int) -> int:
    found[0] = host + OFFSET
    return 0


def make_driver(calls: list[Any], code: int = 0) -> FakeDriver:
    """Return a driver whose first versions are disabled, as in real drivers by default."""
    driver = FakeDriver()
    for name in ("cuStreamWriteValue32", "cuStreamWaitValue32"):

        def note(*args: int, name: str = name) -> int:
            calls.append((name, *args))
            return code

        driver.functions[name, 8000] = OPERATION(lambda *args: NOT_SUPPORTED)
        driver.functions[name, 11070] = OPERATION(note)
    driver.functions["cuMemHostGetDevicePointer", 3020] = ADDRESS(seen_at)
    return driver


@pytest.mark.parametrize("says_where", [True, False])
def test_the_versions_that_are_switched_on_are_called(says_where: bool) -> None:
    calls: list[Any] = []
    library = make_driver(calls)
    if not says_where:  # a word then has the host's own address
        library.functions["cuMemHostGetDevicePointer", 3020] = ADDRESS(lambda *args: NOT_SUPPORTED)
    signals = StreamSignals(Driver(library), lambda: STREAM)
    signals.ring(WORD)
    signals.wait(WORD)
    address = WORD.data_ptr() + OFFSET * says_where
    # A write comes after all earlier work; a wait is for the exact value.
    assert calls == [
        ("cuStreamWriteValue32", STREAM, address, 1, 0),
        ("cuStreamWaitValue32", STREAM, address, 1, 1),
    ]


def test_a_refusal_and_an_old_driver_are_errors_that_name_the_function() -> None:
    library = make_driver([], NOT_SUPPORTED)
    with pytest.raises(DriverError, match="cuStreamWriteValue32 returned 801"):
        StreamSignals(Driver(library), lambda: STREAM).ring(WORD)
    with pytest.raises(DriverError, match="no cuStreamWriteValue32 of CUDA 12"):
        StreamSignals(Driver(FakeDriver()), lambda: STREAM)


_INT_POINTER = ctypes.POINTER(ctypes.c_int)
_TIMEOUT = 17
_HANDLE = 40  # of a device: no index


class LimitedDriver(FakeDriver):
    """A driver whose second device limits the run time of kernels."""

    def __init__(self, names: tuple[str, ...]) -> None:
        super().__init__()
        kind = ctypes.CFUNCTYPE(ctypes.c_int, _INT_POINTER, ctypes.c_int)
        attribute_kind = ctypes.CFUNCTYPE(ctypes.c_int, _INT_POINTER, ctypes.c_int, ctypes.c_int)
        functions = {
            "cuDeviceGet": kind(self._get),
            "cuDeviceGetAttribute": attribute_kind(self._ask),
        }
        self.functions = {(name, 2000): functions[name] for name in names}

    def _get(self, found: Any, index: int) -> int:
        found[0] = _HANDLE + index
        return 0

    def _ask(self, found: Any, attribute: int, device: int) -> int:
        assert attribute == _TIMEOUT
        found[0] = device == _HANDLE + 1
        return 0


ALL = ("cuDeviceGet", "cuDeviceGetAttribute")


@pytest.mark.parametrize(
    ("index", "names", "seconds"),
    [
        (0, ALL, LONGEST_SECONDS),
        (1, ALL, WATCHED_SECONDS),
        (0, ("cuDeviceGet",), WATCHED_SECONDS),  # a driver that does not say
        (0, (), WATCHED_SECONDS),
    ],
)
def test_a_wait_is_as_long_as_the_driver_lets_it(
    index: int, names: tuple[str, ...], seconds: float
) -> None:
    assert longest_wait(index, Driver(LimitedDriver(names))) == seconds
    assert seconds < PATIENCE_SECONDS
