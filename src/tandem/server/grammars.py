"""Grammars as the HTTP side gets them: built first in a process that may be killed.

What a grammar costs is seldom known before it is paid: a schema of 40 bytes may take minutes. So
nothing is built in this process, and in the engine process only what has passed.

The limit is processor time, not the wall's: on a busy machine the same grammar passes as on an idle
one. There are two lanes. In the first one a grammar has a moment, which nearly all need less than;
who needs more waits for the second one. So grammars made to be slow delay each other, and an honest
one by moments. Both lines are bounded, and what has passed is not built again.

Order: `submit` of a request comes after `build` has returned its grammar.
"""

import asyncio
import contextlib
import hashlib
import json
import pickle
import socket
import subprocess
import sys
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

from tandem.apis.errors import busy, server_error
from tandem.core.errors import ConfigError
from tandem.engine.grammar_process import STARTED, Build, GrammarJob, Tables, framed, main

# Processor time of a grammar, its matcher and its first mask.
_MOMENT_SECONDS, _LIMIT_SECONDS = 0.05, 0.3
# On a machine whose other work leaves a grammar a tenth of one core.
_WALL_FACTOR = 10
# The tables of a large vocabulary take a second; so long a machine may be too busy for that.
_START_SECONDS = 60.0
_MOST_WAITING = 64
_RETRY_SECONDS = 5
_KEPT, _KEPT_CHARACTERS = 256, 8 << 20
_TOO_LONG = (
    f"the grammar takes more than {_LIMIT_SECONDS} seconds of processor time, or too much memory, "
    "to build; make its schemas, patterns or lists smaller"
)


@dataclass(slots=True)
class _Lane:
    """Grammars with a limit of processor time, one after the other."""

    seconds: float
    _place: asyncio.Lock = field(default_factory=asyncio.Lock)
    _num_waiting: int = 0

    @contextlib.asynccontextmanager
    async def place(self) -> AsyncIterator[None]:
        """Wait for one's turn; `ApiError` where too many do."""
        if self._num_waiting >= _MOST_WAITING:
            raise busy("too many grammars are waiting to be built; ask again later", _RETRY_SECONDS)
        self._num_waiting += 1
        try:
            await self._place.acquire()
        finally:
            self._num_waiting -= 1
        try:
            yield
        finally:
            self._place.release()


@dataclass(slots=True, eq=False)
class _UnderWay:
    """A grammar that is being built, for all requests that have it."""

    task: "asyncio.Task[str | None]"
    num_requests: int = 0


class Grammars:
    """Builds grammars in a process of its own, which is started again if it ends."""

    def __init__(self, tables: Callable[[], Tables]) -> None:
        """Start nothing yet; `tables` is called in a thread."""
        self._tables = tables
        self._starting: asyncio.Task[socket.socket] | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._is_closed = False
        self._lanes = (_Lane(_MOMENT_SECONDS), _Lane(_LIMIT_SECONDS))
        self._under_way: dict[bytes, _UnderWay] = {}
        self._passed: OrderedDict[bytes, str | None] = OrderedDict()

    @property
    def pid(self) -> int | None:
        """The number of the grammar process."""
        return None if self._process is None else self._process.pid

    def start(self) -> None:
        """Begin to build tables, in the background, so that the first grammar finds them."""
        self._control_soon()

    def close(self) -> None:
        """End the process, also one that is being started."""
        self._is_closed = True
        self._end()

    async def build(self, job: GrammarJob) -> str | None:
        """Return the grammar that a job writes; raises `ConfigError` or `ApiError`.

        Cancelling it ends the work, unless another request has the same grammar.
        """
        data, key = await asyncio.to_thread(_pickled, job)
        if key in self._passed:
            self._passed.move_to_end(key)
            return self._passed[key]
        under_way = self._under_way.get(key)
        if under_way is None:
            task = asyncio.ensure_future(self._built(data, key))
            under_way = self._under_way[key] = _UnderWay(task)
        under_way.num_requests += 1
        try:
            return await asyncio.shield(under_way.task)
        finally:
            under_way.num_requests -= 1
            if not under_way.num_requests:
                under_way.task.cancel()
                if self._under_way.get(key) is under_way:
                    del self._under_way[key]

    async def _built(self, data: bytes, key: bytes) -> str | None:
        for lane in self._lanes:
            async with lane.place():
                answer = await self._ask(Build(data, lane.seconds, lane.seconds * _WALL_FACTOR))
            if answer is not None:
                break
        else:
            raise ConfigError(_TOO_LONG)
        if "problem" in answer:
            raise ConfigError(str(answer["problem"]))
        self._keep(key, answer["grammar"])
        return answer["grammar"]

    def _keep(self, key: bytes, grammar: str | None) -> None:
        kept = self._passed
        kept[key] = grammar
        while len(kept) > _KEPT or sum(len(one or "") for one in kept.values()) > _KEPT_CHARACTERS:
            kept.popitem(last=False)

    # ---- the process -----------------------------------------------------------------------------

    async def _ask(self, build: Build) -> dict[str, str | None] | None:
        """Return what a fork answers; None: it was ended by a limit."""
        for _ in range(2):  # the process may have been killed, which costs no request
            starting = self._control_soon()
            with contextlib.suppress(OSError, EOFError):
                async with asyncio.timeout(_START_SECONDS):
                    return await _ask_fork(await asyncio.shield(starting), build)
            if self._starting is starting:
                self._starting = None
        raise server_error("grammars cannot be built now; ask again", status=503)

    def _control_soon(self) -> "asyncio.Task[socket.socket]":
        if self._starting is None:
            self._starting = asyncio.ensure_future(asyncio.to_thread(self._begin))
            # Each request gets the reason; at the end there may be none.
            self._starting.add_done_callback(lambda done: done.cancelled() or done.exception())
        return self._starting

    def _begin(self) -> socket.socket:
        """Start the process, in a thread, and send it what its tables are built of."""
        self._end()
        ours, theirs = socket.socketpair()
        with theirs:
            # A session of its own: Ctrl-C is for the HTTP side, which closes the socket.
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-c", f"from {main.__module__} import main; main()"],
                stdin=theirs.fileno(), stdout=subprocess.DEVNULL, start_new_session=True,
            )  # fmt: skip
        self._control = ours
        if self._is_closed:  # `close` sets this before it looks for a process
            self._end()
        ours.sendall(framed(self._tables()))
        return ours

    def _end(self) -> None:
        if self._control is not None:
            self._control.close()
        if self._process is not None:
            self._process.kill()
            self._process.wait()


async def _ask_fork(control: socket.socket, build: Build) -> dict[str, str | None] | None:
    """Return what a fork answers; raises `EOFError` if none has begun."""
    ours, theirs = socket.socketpair()
    with theirs:
        try:
            socket.send_fds(control, [b"b"], [theirs.fileno()])
        except OSError:  # the process has ended
            ours.close()
            raise
    reader, writer = await asyncio.open_connection(sock=ours)
    try:
        writer.write(framed(build))
        if await reader.read(1) != STARTED:
            raise EOFError
        answer = b""
        with contextlib.suppress(ConnectionError):
            answer = await reader.read()
        return json.loads(answer) if answer else None
    finally:
        writer.transport.abort()  # which ends the fork


def _pickled(job: GrammarJob) -> tuple[bytes, bytes]:
    data = pickle.dumps(job)
    return data, hashlib.sha256(data).digest()
