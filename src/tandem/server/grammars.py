"""Builds grammars for the HTTP side, first in a process that may be killed.

The cost of a grammar is seldom known in advance: a schema of 40 bytes may take minutes. So no
grammar is built in this process, and the engine process builds only grammars that have passed.

The limit is processor time, so that a busy machine passes the same grammars as an idle one. There
are two queues. In the first, a grammar gets a short time, which is enough for nearly all grammars;
a grammar that needs more waits in the second. So grammars made to be slow delay each other for
long, but other grammars only briefly. Both queues are bounded, and a grammar that has passed is not
built again.

A request must be submitted only after `build` has returned its grammar.
"""

import asyncio
import contextlib
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

from tandem.apis.errors import busy
from tandem.core.errors import ConfigError
from tandem.engine.grammar_process import Build, Tables, Writer, main
from tandem.engine.helper import Limits, framed
from tandem.server.helper_process import HelperProcess

# CPU seconds for a grammar, its matcher and its first mask: short, and at most.
_MOMENT_SECONDS, _LIMIT_SECONDS = 0.05, 0.3
# Allows for a machine whose other work leaves a tenth of one core.
_WALL_FACTOR = 10
# Besides the tables. Accepted grammars take some tens of MB.
_MEMORY_BYTES = 1 << 30
_MOST_WAITING = 64
_RETRY_SECONDS = 5
_KEPT, _KEPT_CHARACTERS = 256, 8 << 20
_TOO_LONG = (
    f"the grammar takes more than {_LIMIT_SECONDS} seconds of processor time, or too much memory, "
    "to build; make its schemas, patterns or lists smaller"
)


@dataclass(slots=True)
class _Queue:
    """A queue of grammars, with a limit of processor time for each grammar."""

    seconds: float
    _place: asyncio.Lock = field(default_factory=asyncio.Lock)
    _num_waiting: int = 0

    @contextlib.asynccontextmanager
    async def place(self) -> AsyncIterator[None]:
        """Wait for a turn and hold it in the `with` body; `ApiError` if the queue is full."""
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
    """A grammar that is being built, once for all requests that need it."""

    task: "asyncio.Task[str | None]"
    num_requests: int = 0


class Grammars:
    """Builds grammars in a separate process, which is restarted if it ends."""

    def __init__(self, tables: Callable[[], Tables]) -> None:
        """Prepare; no process is started yet. At each start, a thread calls `tables`."""
        self.process = HelperProcess(
            main, lambda: framed(tables()), unavailable="grammars cannot be built now; ask again"
        )
        self._queues = (_Queue(_MOMENT_SECONDS), _Queue(_LIMIT_SECONDS))
        self._under_way: dict[bytes, _UnderWay] = {}
        self._passed: OrderedDict[bytes, str | None] = OrderedDict()

    async def build(self, writer: Writer) -> str | None:
        """Build the grammar that `writer` writes, and return it; None if `writer` writes none.

        Raises `ConfigError` for a grammar that cannot be built within the limits, and `ApiError` if
        the queue is full or the process cannot be reached. Cancelling the call ends the work,
        unless another request waits for the same grammar.
        """
        key = writer.key
        if key in self._passed:
            self._passed.move_to_end(key)
            return self._passed[key]
        under_way = self._under_way.get(key)
        if under_way is None:
            task = asyncio.ensure_future(self._built(writer))
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

    async def _built(self, writer: Writer) -> str | None:
        for queue in self._queues:
            limits = Limits(queue.seconds, queue.seconds * _WALL_FACTOR, _MEMORY_BYTES)
            async with queue.place():
                answer = await self.process.ask(framed(Build(writer.data, limits)))
            if answer is not None:
                break
        else:
            raise ConfigError(_TOO_LONG)
        if "problem" in answer:
            raise ConfigError(str(answer["problem"]))
        grammar: str | None = answer["grammar"]
        self._keep(writer.key, grammar)
        return grammar

    def _keep(self, key: bytes, grammar: str | None) -> None:
        kept = self._passed
        kept[key] = grammar
        while len(kept) > _KEPT or sum(len(one or "") for one in kept.values()) > _KEPT_CHARACTERS:
            kept.popitem(last=False)
