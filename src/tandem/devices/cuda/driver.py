"""Looks up functions of the CUDA driver, each in an explicit version.

A symbol of libcuda.so always means the first version of its function; cuda.h maps names to later
versions by macros. So the symbol `cuStreamWriteValue32` is the version that drivers disable by
default. `cuGetProcAddress` (CUDA 12) returns the function as of a given version of CUDA.
"""

import ctypes
from collections.abc import Callable
from typing import Any

DRIVER_LIBRARY = "libcuda.so.1"
_DEFAULT_FLAGS = 0  # CU_GET_PROC_ADDRESS_DEFAULT

Function = Callable[..., int]


class DriverError(RuntimeError):
    """A driver function returned an error code, or the driver lacks the function."""


class Driver:
    """Looks up functions of a loaded driver library."""

    def __init__(self, library: Any) -> None:
        """Take a loaded library; raises `AttributeError` if its driver is older than CUDA 12."""
        self._get_address = library.cuGetProcAddress_v2

    def find(self, name: str, version: int, *argument_types: type) -> Function | None:
        """Return a function as of CUDA `version` (12.8 is 12080); None: the driver is older."""
        address = ctypes.c_void_p()
        code = self._get_address(
            ctypes.c_char_p(name.encode()),
            ctypes.byref(address),
            ctypes.c_int(version),
            ctypes.c_uint64(_DEFAULT_FLAGS),
            None,  # the reason for a missing function is not requested
        )
        if code != 0 or not address.value:
            return None
        return ctypes.CFUNCTYPE(ctypes.c_int, *argument_types)(address.value)

    def require(self, name: str, version: int, *argument_types: type) -> Function:
        """Return a function as `find` does; a call raises `DriverError` for an error code.

        Raises `DriverError` if the driver is older.
        """
        function = self.find(name, version, *argument_types)
        if function is None:
            raise DriverError(f"the driver has no {name} of CUDA {version // 1000}")

        def call(*arguments: object) -> int:
            code = function(*arguments)
            if code != 0:
                raise DriverError(f"{name} returned {code}")
            return code

        return call


def open_driver(load: Callable[[str], object] = ctypes.CDLL) -> Driver | None:
    """Return this machine's driver; None if there is no driver of CUDA 12 or newer."""
    try:
        return Driver(load(DRIVER_LIBRARY))
    except (OSError, AttributeError):
        return None
