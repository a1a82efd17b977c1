"""Writes and waits in a stream's order: what the driver is asked for, and by which version."""

import ctypes
from typing import Any

import pytest

from tandem.devices.cuda.driver import Driver, DriverError
from tandem.devices.cuda.stream_ops import StreamOps
from tests.experts.fake_driver import FakeDriver

# CUresult cuStreamWriteValue32(CUstream, CUdeviceptr, cuuint32_t, unsigned int), and the wait alike
OPERATION = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint32, ctypes.c_uint
)
ADDRESS = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.POINTER(ctypes.c_uint64), ctypes.c_void_p, ctypes.c_uint
)
NOT_SUPPORTED = 801
HOST, SEEN_AT, STREAM = 0x7F00_0000_1000, 0x2_0000_0000_1000, 0x5500


def seen_at(found: Any, host: int, flags: int) -> int:
    found[0] = host - HOST + SEEN_AT
    return 0


def make_driver(calls: list[Any], code: int = 0) -> FakeDriver:
    """Return a driver whose first versions are switched off, as real ones are by default."""
    driver = FakeDriver()
    for name in ("cuStreamWriteValue32", "cuStreamWaitValue32"):

        def note(*args: int, name: str = name) -> int:
            calls.append((name, *args))
            return code

        driver.functions[name, 8000] = OPERATION(lambda *args: NOT_SUPPORTED)
        driver.functions[name, 11070] = OPERATION(note)
    driver.functions["cuMemHostGetDevicePointer", 3020] = ADDRESS(seen_at)
    return driver


def test_the_versions_that_are_switched_on_are_called() -> None:
    calls: list[Any] = []
    library = make_driver(calls)
    operations = StreamOps(Driver(library))
    address = operations.address_of(HOST + 64)
    assert address == SEEN_AT + 64
    operations.write(STREAM, address, 1)
    operations.wait(STREAM, address, 1)
    # A write is behind all that came before; a wait is for the value itself.
    assert calls == [
        ("cuStreamWriteValue32", STREAM, address, 1, 0),
        ("cuStreamWaitValue32", STREAM, address, 1, 1),
    ]


def test_where_the_driver_does_not_say_a_word_is_at_the_hosts_address() -> None:
    library = make_driver([])
    library.functions["cuMemHostGetDevicePointer", 3020] = ADDRESS(lambda *args: NOT_SUPPORTED)
    assert StreamOps(Driver(library)).address_of(HOST) == HOST


def test_a_refusal_and_an_old_driver_are_errors_that_name_the_function() -> None:
    library = make_driver([], NOT_SUPPORTED)
    with pytest.raises(DriverError, match="cuStreamWriteValue32 returned 801"):
        StreamOps(Driver(library)).write(STREAM, SEEN_AT, 1)
    with pytest.raises(DriverError, match="no cuStreamWriteValue32 of CUDA 12"):
        StreamOps(Driver(FakeDriver()))
