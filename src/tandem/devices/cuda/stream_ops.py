"""Writes and waits on words of memory, in a stream's order: how a graph and a thread hand over.

They can be captured. In a graph they carry constants, so the words are flags that are reset, not
counters. Memory on the host must be pinned. A wait that is never ended holds its stream for ever.
"""

import ctypes

from tandem.devices.cuda.driver import Driver

# The versions that are not switched off by default are those of CUDA 11.7.
_VERSION = 12000
# CU_STREAM_WRITE_VALUE_DEFAULT: all that came before is visible, also to the host, before the word.
_BEHIND_ALL = 0
_EQUAL = 1  # CU_STREAM_WAIT_VALUE_EQ
_ARGUMENTS = (ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint32, ctypes.c_uint)


class StreamOps:
    """`cuStreamWriteValue32` and `cuStreamWaitValue32`."""

    def __init__(self, driver: Driver) -> None:
        """Find the functions; raises `DriverError` where there are none.

        Whether they work is found by using them: the attribute that says so is of older versions.
        """
        self._write = driver.require("cuStreamWriteValue32", _VERSION, *_ARGUMENTS)
        self._wait = driver.require("cuStreamWaitValue32", _VERSION, *_ARGUMENTS)
        self._address = driver.find(
            "cuMemHostGetDevicePointer",
            _VERSION,
            ctypes.POINTER(ctypes.c_uint64),
            ctypes.c_void_p,
            ctypes.c_uint,
        )

    def address_of(self, host: int) -> int:
        """Return where the device sees a word of pinned host memory.

        Where the driver does not say, at the host's own address: all 64-bit systems have but one
        space of addresses, and only registered memory may lie elsewhere in it.
        """
        found = ctypes.c_uint64()
        if self._address is None or self._address(ctypes.byref(found), host, 0) != 0:
            return host
        return found.value

    def write(self, stream: int, address: int, value: int) -> None:
        """Queue a write, behind all that is queued and visible only after it."""
        self._write(stream, address, value, _BEHIND_ALL)

    def wait(self, stream: int, address: int, value: int) -> None:
        """Hold a stream until a word is equal to `value`."""
        self._wait(stream, address, value, _EQUAL)
