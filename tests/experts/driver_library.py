"""Builds the driver's library of `fake_cuda.c`: native code loads it as it loads a real one."""

import ctypes
import subprocess
from pathlib import Path

SOURCE = Path(__file__).with_name("fake_cuda.c")


class DriverLibrary:
    """A library of its own, and what it is to do."""

    def __init__(self, directory: Path) -> None:
        """Compile it to a new file."""
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
        """Choose how late streams are, in microseconds, which calls fail, which function lacks."""
        self._library.fake_reset(delay, copy_code, write_code, has_context, hidden.encode())

    def hold(self, *, holds: bool) -> None:
        """Let nothing happen on the streams, or all that is queued."""
        self._library.fake_hold(int(holds))

    @property
    def num_left(self) -> int:
        """Streams and events that have not been given back."""
        return int(self._library.fake_left())

    @property
    def num_copies(self) -> int:
        """Copies so far."""
        return int(self._library.fake_copies())
