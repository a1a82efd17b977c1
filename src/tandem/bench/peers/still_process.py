"""A process that is stopped except while it answers, for systems that are timed in turns.

Such systems let their idle threads spin, have their own OpenMP and may crash. They must not disturb
the measurement of another system.
"""

import multiprocessing
import os
import signal
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

_LAST_SECONDS = 2.0

# Returns a message for when everything is loaded, and the function that answers requests.
Prepare = Callable[..., tuple[object, Callable[[Any], object]]]


class StillProcess:
    """A process that is stopped except while it answers; it must be closed after use.

    If the process fails, methods raise `OSError` with the message that it sent.
    """

    def __init__(self, prepare: Prepare, *arguments: object, seconds: float) -> None:
        """Start the process, wait up to `seconds` until it is ready, and stop it."""
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(
            target=_serve, args=(theirs, prepare, arguments), daemon=True
        )
        self._process.start()
        theirs.close()
        try:
            self.prepared = self._receive(seconds)
        except OSError:
            self.close()
            raise
        os.kill(self.pid, signal.SIGSTOP)

    def ask(self, question: object, seconds: float) -> Any:
        """Let the process run until it answers `question`; return the answer.

        Raises `OSError` if this takes longer than `seconds`.
        """
        os.kill(self.pid, signal.SIGCONT)
        self._connection.send(question)
        answer = self._receive(seconds)
        os.kill(self.pid, signal.SIGSTOP)
        return answer

    def close(self) -> None:
        """End the process: let it exit by itself, or kill it if that takes too long."""
        self._connection.close()
        if self._process.is_alive():
            os.kill(self.pid, signal.SIGCONT)
        self._process.join(_LAST_SECONDS)
        self._process.kill()
        self._process.join()

    @property
    def pid(self) -> int:
        """The process id."""
        assert self._process.pid is not None
        return self._process.pid

    @property
    def peak_bytes(self) -> int:
        """The peak resident bytes of the process, mapped files included; 0: unknown."""
        try:
            status = Path(f"/proc/{self.pid}/status").read_text(encoding="ascii", errors="replace")
        except OSError:
            return 0
        peak = next((line for line in status.splitlines() if line.startswith("VmHWM:")), "0 0")
        return int(peak.split()[1]) << 10

    def _receive(self, seconds: float) -> Any:
        if not self._connection.poll(seconds):
            raise TimeoutError(f"no answer within {seconds:.0f} s")
        try:
            found = self._connection.recv()
        except EOFError:
            self._process.join()
            raise OSError(f"it ended with exit code {self._process.exitcode}") from None
        if isinstance(found, str):
            raise OSError(found)
        return found


def _serve(connection: Connection, prepare: Prepare, arguments: tuple[object, ...]) -> None:
    """Answer until the other side closes the connection; an error is sent as its message."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # the parent process reports what Ctrl-C ended
    try:
        prepared, answer = prepare(*arguments)
        connection.send(prepared)
        while True:
            connection.send(answer(connection.recv()))
    except EOFError:
        return
    except Exception as error:  # a system may raise anything; the parent process reports it
        connection.send(f"{type(error).__name__}: {error}")
