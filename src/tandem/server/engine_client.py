"""The engine process as seen by the HTTP side: a bounded queue, answers as streams, restarts.

Requests wait here, in order, and are sent to the engine process when a sequence slot is free. So
when the process dies, only the running requests are lost.
"""

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace

from tandem.apis.errors import ApiError, busy, server_error
from tandem.core.errors import ExecutionError
from tandem.engine.messages import (
    EXIT_CANNOT_LOAD,
    Cancel,
    EngineSettings,
    EngineStatistics,
    Failed,
    Live,
    ModelInfo,
    ModelLoader,
    Progressed,
    Ready,
    Report,
    Submit,
    Watch,
)
from tandem.engine.process import EngineProcess
from tandem.generate.request import Request
from tandem.generate.token_output import TokenOutput
from tandem.generate.waiting_line import WaitingLine

_log = logging.getLogger("tandem.server")
# Delays between restarts. A process that always dies at once is restarted less and less often.
_RESTART_SECONDS = (0.0, 1.0, 5.0, 15.0, 60.0)
# Assumed duration of a request until one has ended.
_FIRST_GUESS_SECONDS = 5.0
# Weight of the latest request in the mean duration.
_NEWEST = 0.2
# A page that reads slowly gets only the newest snapshots.
_SNAPSHOTS = 4
# After this many looks in a row without a message, the engine process counts as hung. Looks are
# counted instead of seconds, because after a stop of this process its pipe is full of messages.
_LOOKS = 8
_LOST = "the model cannot be loaded; the server's log says why; fix that and restart the server"


class TokenOutputs:
    """The token outputs of requests that were submitted together, in order of arrival."""

    def __init__(self, numbers: range) -> None:
        """Start without outputs; `numbers` are the consecutive numbers of the requests."""
        self.numbers = numbers
        self._queue: asyncio.Queue[TokenOutput | ApiError] = asyncio.Queue()

    def put(self, token_output: TokenOutput | ApiError) -> None:
        """Queue a token output, or an error, which iteration raises instead of further outputs."""
        self._queue.put_nowait(token_output)

    async def __aiter__(self) -> AsyncIterator[tuple[int, TokenOutput]]:
        """Yield (index of the request, token output) until all requests have ended or one fails.

        Raises the `ApiError` of the request that failed.
        """
        num_open = len(self.numbers)
        while num_open:
            token_output = await self._queue.get()
            if isinstance(token_output, ApiError):
                raise token_output
            num_open -= token_output.finish_reason is not None
            yield token_output.request_id - self.numbers[0], token_output


@dataclass(slots=True, eq=False)
class _Pending:
    """A submitted request that has not ended."""

    request: Request
    token_outputs: TokenOutputs
    images: bytes | None = None
    is_running: bool = False
    began: float = field(default_factory=time.monotonic)


class EngineClient:
    """Submits requests to the engine process, and keeps that process running."""

    def __init__(
        self,
        load: ModelLoader,
        settings: EngineSettings,
        *,
        max_waiting: int,
        most_silent_seconds: float = math.inf,
    ) -> None:
        """Prepare the client; `start` starts the process.

        A process that sends nothing for `most_silent_seconds` while requests run is killed.
        """
        self.on_begin: Callable[[float], None] = lambda seconds: None
        """Called when a request gets a sequence slot, with the seconds that it has waited."""
        self._load, self._settings = load, settings
        self._max_waiting = max_waiting
        self._most_silent_seconds = most_silent_seconds
        self._silent_looks = 0
        self._next_number = 1
        self._pending: dict[int, _Pending] = {}
        self._waiting = WaitingLine[_Pending]()
        self._process: EngineProcess | None = None
        self._watchers: set[asyncio.Queue[str]] = set()
        self._ready = asyncio.Event()
        self._first_problem: str | None = None
        self._is_lost = False
        self._mean_seconds = _FIRST_GUESS_SECONDS
        self._is_draining = self._is_closed = False
        self._restarts_in_a_row = 0
        self._tasks: set[asyncio.Future[None]] = set()
        self.info: ModelInfo | None = None
        self.statistics = EngineStatistics()
        self.num_restarts = 0

    @property
    def is_ready(self) -> bool:
        """Whether the model is loaded and the server is not shutting down."""
        return self._ready.is_set() and not self._is_draining

    @property
    def num_running(self) -> int:
        """How many requests have been sent to the engine process and have not ended."""
        return len(self._pending) - len(self._waiting)

    @property
    def num_waiting(self) -> int:
        """How many requests wait for a sequence slot."""
        return len(self._waiting)

    @property
    def pid(self) -> int | None:
        """The engine process's id; None before its start."""
        return None if self._process is None else self._process.pid

    async def start(self) -> ModelInfo:
        """Start the engine process and wait for the model; `ExecutionError` if it cannot load."""
        self._begin_process()
        if self._most_silent_seconds < math.inf:
            self._keep(self._look())
        await self._ready.wait()
        if self.info is None:
            raise ExecutionError(self._first_problem or "the engine process ended while loading")
        return self.info

    @property
    def room(self) -> int:
        """How many more requests would be accepted now."""
        if self._is_draining or self._is_lost:
            return 0
        return max(0, self._num_slots + self._max_waiting - len(self._pending))

    def require_room(self, number: int) -> None:
        """Raise `ApiError` unless `number` more requests can be accepted now."""
        if self._is_draining:
            raise server_error("the server is shutting down; ask again later", status=503)
        if self._is_lost:
            raise server_error(_LOST, status=503)
        room = self._num_slots + self._max_waiting
        if number > room:
            raise ApiError(
                400,
                f"this asks for {number} answers at once (prompts times n), and the server takes "
                f"on {room} altogether; send fewer, or start it with a larger --max-waiting",
            )
        if len(self._pending) + number > room:
            raise busy(
                f"{len(self._pending)} requests are running or waiting, and this server takes on "
                f"{room}; ask again later",
                self._retry_after(),
            )

    def submit(self, *requests: Request, images: bytes | None = None) -> TokenOutputs:
        """Submit all of these requests or none; return an iterator over their token outputs.

        The iterator's `numbers` identify the requests for `cancel`. `images` are the prompt's
        images, pickled, the same for each request. Raises `ApiError` as `require_room` does.
        """
        self.require_room(len(requests))
        first = self._next_number
        self._next_number += len(requests)
        token_outputs = TokenOutputs(range(first, self._next_number))
        for number, request in zip(token_outputs.numbers, requests, strict=True):
            pending = _Pending(replace(request, request_id=number), token_outputs, images)
            self._pending[number] = pending
            self._waiting.add(number, request.priority, pending)
        self._send_waiting()
        return token_outputs

    def cancel(self, numbers: Sequence[int]) -> None:
        """Cancel these requests, except those that have ended; their sequence slots become free."""
        self._drop(numbers)
        self._send_waiting()

    def _drop(self, numbers: Sequence[int]) -> list[_Pending]:
        """Forget these requests, and cancel those that run; return those that had not ended."""
        dropped = [self._pending.pop(number) for number in numbers if number in self._pending]
        self._waiting.drop(numbers)
        for pending in dropped:
            if pending.is_running and self._process is not None:
                self._process.send(Cancel(pending.request.request_id))
        return dropped

    @contextlib.asynccontextmanager
    async def watching(self) -> AsyncIterator["asyncio.Queue[str]"]:
        """Yield a queue that receives snapshots while the context is open."""
        snapshots: asyncio.Queue[str] = asyncio.Queue(_SNAPSHOTS)
        self._watchers.add(snapshots)
        self._tell_watching()
        try:
            yield snapshots
        finally:
            self._watchers.discard(snapshots)
            self._tell_watching()

    async def drain(self, seconds: float) -> None:
        """Accept no more requests; give accepted requests `seconds` to end, then fail the rest."""
        self._is_draining = True
        end = time.monotonic() + seconds
        while self._pending and time.monotonic() < end:
            await asyncio.sleep(0.02)
        self.fail(list(self._pending), "the server is shutting down", status=503)

    async def close(self) -> None:
        """End the engine process; remaining requests fail."""
        self._is_draining = self._is_closed = True
        self.fail(list(self._pending), "the server is shutting down", status=503)
        for task in self._tasks:
            task.cancel()
        if self._process is not None:
            await self._process.stop(is_patient=self.info is not None)

    # ---- messages from the engine process --------------------------------------------------------

    def _begin_process(self) -> None:
        self._process = EngineProcess(self._load, self._settings, self._take, self._ended)

    async def _look(self) -> None:
        """Kill the engine process whenever it is silent for too long while requests run."""
        while True:
            await asyncio.sleep(self._most_silent_seconds / _LOOKS)
            self._silent_looks += 1
            if not self._ready.is_set() or not self.num_running:
                self._silent_looks = 0
            elif self._silent_looks == _LOOKS and self._process is not None:
                self._process.kill()  # `_ended` follows

    def _take(self, message: object) -> None:
        self._silent_looks = 0
        if isinstance(message, Progressed):
            for token_output in message.token_outputs:
                self._hand_on(token_output)
            self._send_waiting()
        elif isinstance(message, Report):
            self.statistics = message.statistics
        elif isinstance(message, Live):
            self._show(message.snapshot)
        elif isinstance(message, Failed):
            if not message.request_ids:  # not the fault of a request: loading the model failed
                self._first_problem = self._first_problem or message.message
            if message.is_theirs:
                self._tell(message.request_ids, ApiError(400, message.message))
            else:
                self.fail(message.request_ids, message.message)
        elif isinstance(message, Ready):
            self.info = message.info
            self._first_problem = None
            self._ready.set()
            self._tell_watching()
            self._send_waiting()

    def _hand_on(self, token_output: TokenOutput) -> None:
        pending = self._pending.get(token_output.request_id)
        if pending is None:
            return  # cancelled meanwhile
        pending.token_outputs.put(token_output)
        if token_output.finish_reason is not None:
            del self._pending[token_output.request_id]
            self._restarts_in_a_row = 0
            seconds = time.monotonic() - pending.began
            self._mean_seconds += _NEWEST * (seconds - self._mean_seconds)

    def _ended(self, process: EngineProcess) -> None:
        """Fail the running requests of an engine process that has ended, and start a new process.

        If the model cannot be loaded, fail all requests instead, and start no process.
        """
        if self._is_closed:
            return
        running = [n for n, pending in self._pending.items() if pending.is_running]
        was_ready = self.info is not None
        if not was_ready or process.exit_code == EXIT_CANNOT_LOAD:
            self._is_lost = True
            self._ready.clear()
            _log.error("the model cannot be loaded: %s", self._first_problem)
            self.fail(list(self._pending), _LOST, status=503)
            if not was_ready:
                self._ready.set()  # wakes `start`, which finds no model
            return
        self._ready.clear()
        what = "ended"
        if self._silent_looks >= _LOOKS:
            what = f"gave no sign of life for {self._most_silent_seconds:g} seconds"
        self._silent_looks = 0
        _log.error(
            "the engine process %s (exit code %s); starting it again", what, process.exit_code
        )
        self.fail(
            running,
            f"the engine process {what} while this request was running; ask again",
            status=503,
        )
        self.num_restarts += 1
        self._keep(self._restart())

    def _keep(self, work: Awaitable[None]) -> None:
        """Run a coroutine in the background until `close`."""
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _restart(self) -> None:
        pause = _RESTART_SECONDS[min(self._restarts_in_a_row, len(_RESTART_SECONDS) - 1)]
        self._restarts_in_a_row += 1
        await asyncio.sleep(pause)
        if not self._is_closed:
            self._begin_process()

    # ---- slots -----------------------------------------------------------------------------------

    @property
    def _num_slots(self) -> int:
        return self._settings.max_running if self.info is None else self.info.max_running

    def _send_waiting(self) -> None:
        if not self._ready.is_set() or self._process is None or self.info is None:
            return
        free = self._num_slots - self.num_running
        if not self.num_running:
            self._silent_looks = 0
        while free > 0 and len(self._waiting):
            pending = self._waiting.pop()
            pending.is_running = True
            self.on_begin(time.monotonic() - pending.began)
            self._process.send(Submit(pending.request, pending.images))
            free -= 1

    def fail(self, numbers: Sequence[int], message: str, *, status: int = 500) -> None:
        """End these requests, except those that have ended, with an error for their clients."""
        self._tell(numbers, server_error(message, status=status))

    def _tell(self, numbers: Sequence[int], error: ApiError) -> None:
        for pending in self._drop(numbers):
            pending.token_outputs.put(error)
        self._send_waiting()

    def _retry_after(self) -> int:
        """Return an estimate of the seconds until half of the waiting requests have started."""
        rounds = max(1.0, len(self._waiting) / 2 / self._num_slots)
        return max(1, min(120, math.ceil(rounds * self._mean_seconds)))

    # ---- watchers --------------------------------------------------------------------------------

    def _tell_watching(self) -> None:
        if self._process is not None:
            self._process.send(Watch(bool(self._watchers)))

    def _show(self, snapshot: str) -> None:
        for snapshots in self._watchers:
            if snapshots.full():
                snapshots.get_nowait()
            snapshots.put_nowait(snapshot)
