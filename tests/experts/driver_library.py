"""CUDA's driver without a GPU: a library for native code (`fake_cuda.c`), functions for Python."""

import ctypes
import subprocess
from pathlib import Path
from typing import Any

SOURCE = Path(__file__).with_name("fake_cuda.c")
_SYMBOL_NOT_FOUND = 500
_GET_ADDRESS = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.c_char_p, ctypes.POINTER(ctypes.c_void_p), ctypes.c_int, ctypes.c_uint64,
    ctypes.c_void_p,
)  # fmt: skip


class DriverLibrary:
    """A copy of the fake driver, and its settings."""

    def __init__(self, directory: Path) -> None:
        """Compile the library to a new file."""
        self.path = str(directory / "libfake_cuda.so")
        command = ["cc", "-shared", "-fPIC", "-O1", "-pthread", "-o", self.path, str(SOURCE)]
        subprocess.run(command, check=True)
        self._library = ctypes.CDLL(self.path)

    def reset(
        self,
        *,
        delay: int = 0,
        copy_code: int = 0,
        write_code: int = 0,
        has_context: bool = True,
        hidden: str = "",
    ) -> None:
        """Set the delay in microseconds, the calls' error codes, and the missing function."""
        self._library.fake_reset(delay, copy_code, write_code, has_context, hidden.encode())

    def hold(self, *, holds: bool) -> None:
        """Hold all work on the streams, or release it."""
        self._library.fake_hold(int(holds))

    @property
    def num_left(self) -> int:
        """The number of streams and events that have not been destroyed."""
        return int(self._library.fake_left())

    @property
    def num_copies(self) -> int:
        """The number of copies so far."""
        return int(self._library.fake_copies())


class FakeDriver:
    """Functions by name and version: returns the newest one that is not newer than requested."""

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
