"""Signals between a stream and the host, through words in shared memory.

Either the hand-over kernels write and poll these words, or the driver's stream memory operations
do, in stream order. Both can be captured. A graph has constants only, so the words are flags that
are reset, not counters. Host memory must be pinned. A stream operation waits without a time limit:
if the host never answers, its stream stays blocked.
"""

import ctypes
from collections.abc import Callable
from typing import Protocol

from torch import Tensor

from tandem.devices.cuda.driver import Driver, DriverError, open_driver

# CUDA 11.7 has the versions that are not switched off by default.
_VERSION = 12000
# CU_STREAM_WRITE_VALUE_DEFAULT: all earlier writes are visible, also to the host, before the word.
_AFTER_ALL = 0
_EQUAL = 1  # CU_STREAM_WAIT_VALUE_EQ
_ARGUMENTS = (ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint32, ctypes.c_uint)

# A kernel must stop waiting before the host does. Otherwise the host would end a step while the GPU
# is still in it.
LONGEST_SECONDS = 9.0
# Some drivers kill a program whose kernel runs for more than 2 seconds (Windows, WSL2) or 5 (Linux
# with a display).
WATCHED_SECONDS = 1.0
_HAS_TIMEOUT = 17  # CU_DEVICE_ATTRIBUTE_KERNEL_EXEC_TIMEOUT


class Signals(Protocol):
    """Lets a stream set a word that the host sees, and wait for a word that the host sets."""

    name: str
    wait_seconds: float
    """The longest time that a kernel waits, if kernels set the doorbell and wait; 0 if stream
    operations do."""

    def ring(self, doorbell: Tensor) -> None:
        """Queue `doorbell = 1` after all queued work; a no-op if kernels set the doorbell."""
        return

    def wait(self, done: Tensor) -> None:
        """Queue a wait for `done == 1`; a no-op if kernels wait."""
        return


class StreamSignals(Signals):
    """Signals by the driver's `cuStreamWriteValue32` and `cuStreamWaitValue32`, in stream order."""

    name, wait_seconds = "stream operations", 0.0

    def __init__(self, driver: Driver, current_stream: Callable[[], int]) -> None:
        """Look up the functions; `current_stream` returns the stream on which they will be queued.

        Raises `DriverError` if the driver lacks the functions. Whether they work shows only in use,
        because the device attribute for stream operations is about their older versions.
        """
        self._current_stream = current_stream
        self._write = driver.require("cuStreamWriteValue32", _VERSION, *_ARGUMENTS)
        self._wait = driver.require("cuStreamWaitValue32", _VERSION, *_ARGUMENTS)
        self._address = driver.find(
            "cuMemHostGetDevicePointer", _VERSION, ctypes.POINTER(ctypes.c_uint64),
            ctypes.c_void_p, ctypes.c_uint,
        )  # fmt: skip

    def ring(self, doorbell: Tensor) -> None:
        """Queue `doorbell = 1`; the host sees it only after all work queued before."""
        self._write(self._current_stream(), self._address_of(doorbell), 1, _AFTER_ALL)

    def wait(self, done: Tensor) -> None:
        """Queue a wait of the stream until `done` is 1."""
        self._wait(self._current_stream(), self._address_of(done), 1, _EQUAL)

    def _address_of(self, word: Tensor) -> int:
        """Return the device's address of a word in pinned host memory.

        If the driver does not tell this address, the host's address is used: 64-bit systems have
        one address space, and only registered memory may have another address on the device.
        """
        host, found = word.data_ptr(), ctypes.c_uint64()
        if self._address is None or self._address(ctypes.byref(found), host, 0) != 0:
            return host
        return found.value


class KernelSignals(Signals):
    """Signals by the hand-over kernels themselves; `ring` and `wait` queue nothing.

    The publish kernel sets the doorbell, and the next kernel that needs the answer polls `done`.
    """

    name = "polling kernels"

    def __init__(self, wait_seconds: float) -> None:
        """Let kernels wait at most `wait_seconds`, by the GPU's clock."""
        self.wait_seconds = wait_seconds


def longest_wait(index: int, driver: Driver | None = None) -> float:
    """Return the seconds that kernels of a GPU may wait: few if the driver may limit run times."""
    driver = driver or open_driver()
    return WATCHED_SECONDS if driver is None or _has_timeout(driver, index) else LONGEST_SECONDS


def _has_timeout(driver: Driver, index: int) -> bool:
    """Tell whether the driver limits the run time of kernels; True if the driver does not say."""
    device, found = ctypes.c_int(), ctypes.c_int()
    number = ctypes.POINTER(ctypes.c_int)
    try:
        get = driver.require("cuDeviceGet", _VERSION, number, ctypes.c_int)
        ask = driver.require("cuDeviceGetAttribute", _VERSION, number, ctypes.c_int, ctypes.c_int)
        get(ctypes.byref(device), index)
        ask(ctypes.byref(found), _HAS_TIMEOUT, device)
    except DriverError:
        return True
    return found.value != 0
