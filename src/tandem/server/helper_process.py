"""A helper process as seen by the HTTP side: started in the background, and restarted if it ends.

`tandem.engine.helper` has the helper's own side. Each job has its own socket. This side closes the
socket when the client has left. A socket that ends without a complete answer means that the helper,
or its fork, has ended.
"""

import asyncio
import contextlib
import socket
import subprocess
import sys
from collections.abc import Callable
from typing import Any

from tandem.apis.errors import server_error
from tandem.engine.helper import STARTED, is_whole, unframed

# Time to load what a job needs, and to do the jobs before it, on a busy machine.
_START_SECONDS = 120.0
_PIECE_BYTES = 1 << 18


class HelperProcess:
    """One helper process, restarted when it ends."""

    def __init__(
        self, main: Callable[[], None], first: Callable[[], bytes], *, unavailable: str
    ) -> None:
        """Prepare; nothing is started yet.

        `main` is the function that the process runs. `first` is called in a thread and returns the
        first message, framed. `unavailable` is the error message for clients if the process cannot
        be started.
        """
        self._main, self._first, self._unavailable = main, first, unavailable
        self._starting: asyncio.Task[socket.socket] | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._is_closed = False

    @property
    def pid(self) -> int | None:
        """The helper's process id; None before its start."""
        return None if self._process is None else self._process.pid

    def start(self) -> None:
        """Start the process in the background, so that the first job finds it running."""
        self._control_soon()

    def close(self) -> None:
        """End the process, even while it is starting."""
        self._is_closed = True
        self._end()

    async def ask(self, job: bytes, *, kind: bytes = b"j", seconds: float | None = None) -> Any:
        """Return the answer to a framed job; None if the helper or the fork ended before answering.

        `kind` is one byte that the helper interprets. A fork that exceeds its limits is ended. If
        the job takes more than `seconds`, the helper itself is killed. Cancelling the call closes
        the job's socket. Raises `ApiError` if the helper cannot be reached.
        """
        # The helper may have been killed; jobs that have not begun can be repeated.
        for _ in range(2):
            starting = self._control_soon()
            with contextlib.suppress(OSError, EOFError):
                async with asyncio.timeout(_START_SECONDS):
                    ours = await begun(await asyncio.shield(starting), kind, job)
                return await self._answer(ours, seconds)
            if self._starting is starting:
                self._starting = None
        raise server_error(self._unavailable, status=503)

    async def _answer(self, ours: socket.socket, seconds: float | None) -> Any:
        with ours:
            try:
                async with asyncio.timeout(seconds):
                    return await _message(ours)
            except TimeoutError:
                if self._process is not None:
                    self._process.kill()
            except (OSError, EOFError):
                pass
        return None

    def _control_soon(self) -> "asyncio.Task[socket.socket]":
        if self._starting is None:
            self._starting = asyncio.ensure_future(asyncio.to_thread(self._begin))
            # Each job reads the exception. At the end there may be no job.
            self._starting.add_done_callback(lambda done: done.cancelled() or done.exception())
        return self._starting

    def _begin(self) -> socket.socket:
        """Start the process, send its first message, and return its socket; runs in a thread."""
        self._end()
        ours, theirs = socket.socketpair()
        with theirs:
            # Its own process group, because Ctrl-C is for the HTTP side, which closes the socket.
            # In its own session Linux would give it as much weight as the whole server, whatever
            # its nice value.
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-c", f"from {self._main.__module__} import main; main()"],
                stdin=theirs.fileno(), stdout=subprocess.DEVNULL, process_group=0,
            )  # fmt: skip
        self._control = ours
        if self._is_closed:  # `close` sets this first, and then looks for a process
            self._end()
        ours.sendall(self._first())
        return ours

    def _end(self) -> None:
        if self._control is not None:
            self._control.close()
        if self._process is not None:
            self._process.kill()
            self._process.wait()


async def begun(control: socket.socket, kind: bytes, job: bytes) -> socket.socket:
    """Start a job and return its socket; raises `EOFError` or `OSError` if it does not start."""
    ours, theirs = socket.socketpair()
    try:
        with theirs:
            socket.send_fds(control, [kind], [theirs.fileno()])
        ours.setblocking(False)
        loop = asyncio.get_running_loop()
        await loop.sock_sendall(ours, job)
        if await loop.sock_recv(ours, 1) != STARTED:
            raise EOFError
    except BaseException:
        ours.close()
        raise
    return ours


async def _message(ours: socket.socket) -> Any:
    loop, found = asyncio.get_running_loop(), bytearray()
    while not is_whole(found):
        if not (piece := await loop.sock_recv(ours, _PIECE_BYTES)):
            raise EOFError
        found += piece
    return unframed(found)
