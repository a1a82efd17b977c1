"""A CUDA driver's library without a GPU: functions by name and version, as `cuGetProcAddress`."""

import ctypes
from typing import Any

_SYMBOL_NOT_FOUND = 500
_GET_ADDRESS = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.c_char_p, ctypes.POINTER(ctypes.c_void_p), ctypes.c_int, ctypes.c_uint64,
    ctypes.c_void_p,
)  # fmt: skip


class FakeDriver:
    """Gives the newest function that is not newer than the version that is asked for."""

    def __init__(self) -> None:
        self.functions: dict[tuple[str, int], Any] = {}  # by name and the version it came with
        self.cuGetProcAddress_v2 = _GET_ADDRESS(self._get_address)

    def _get_address(self, name: bytes, found: Any, version: int, flags: int, status: Any) -> int:
        versions = [v for n, v in self.functions if n == name.decode() and v <= version]
        if not versions:
            found[0] = None
            return _SYMBOL_NOT_FOUND
        function = self.functions[name.decode(), max(versions)]
        found[0] = ctypes.cast(function, ctypes.c_void_p).value
        return 0
