"""A running answer: its cost, its time limits, and its end when the client leaves."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from typing import TypeVar

from fastapi import Request

from tandem.apis.errors import ApiError
from tandem.generate.token_output import TokenOutput
from tandem.server.engine_client import EngineClient
from tandem.server.event_stream import left
from tandem.server.metrics import Metrics
from tandem.server.options import ServerOptions
from tandem.server.preparing import Prepared

_log = logging.getLogger("tandem.server")
T = TypeVar("T")


class RunningAnswer:
    """Runs the generation requests of one body, and measures and logs them.

    It ends them at a time limit, and cancels them if the client leaves.
    """

    def __init__(
        self,
        engine: EngineClient,
        metrics: Metrics,
        options: ServerOptions,
        *,
        endpoint: str,
        prepared: Prepared,
        grammar: str | None = None,
        owner: bytes = b"",
        seconds: float | None = None,
        ended: Callable[[str, int, float], None] = lambda status, tokens, seconds: None,
    ) -> None:
        """Submit the requests; raises `ApiError` if the queue is full.

        `endpoint` is the name for metrics and log. The requests fail after `seconds`, or earlier if
        the options have a shorter limit. `ended` is called once, with the status, the number of
        generated tokens and the seconds.
        """
        self._ended = ended
        self._metrics, self._options = metrics, options
        self._seconds = min(options.request_timeout, seconds or options.request_timeout)
        self._endpoint, self._requests = endpoint, prepared.requests
        self._began = time.monotonic()
        self._first: float | None = None
        self._latest: dict[int, float] = {}  # request -> time of its last token
        self._tokens = 0
        self._status: str | None = None
        self._engine = engine
        self._token_outputs = engine.submit(
            *(replace(one, grammar=grammar, owner=owner) for one in prepared.requests),
            images=prepared.images,
        )
        for text in prepared.texts:
            _log.info("prompt: %r", text)

    async def __aiter__(self) -> AsyncIterator[tuple[int, TokenOutput]]:
        """Yield (request's index, token output) until all end; `ApiError` if a request fails."""
        seconds = self._seconds
        timer = asyncio.get_running_loop().call_later(seconds, self._give_up)
        try:
            async for index, token_output in self._token_outputs:
                self._count(index, token_output)
                yield index, token_output
            self._end("200")
        except ApiError as error:
            self._end(str(error.status))
            raise
        finally:
            timer.cancel()
            self.cancel()

    def _count(self, index: int, token_output: TokenOutput) -> None:
        now = time.monotonic()
        self._first = self._first or now
        self._tokens += token_output.token_id is not None
        if (latest := self._latest.get(index)) is not None:
            self._metrics.gap.observe(now - latest)
        self._latest[index] = now

    def _give_up(self) -> None:
        seconds = self._seconds
        self._engine.fail(
            self._token_outputs.numbers,
            f"the request took longer than {seconds:g} seconds and was given up",
            status=504,
        )

    def cancel(self) -> None:
        """Cancel the requests that have not ended, and count the answer as left by its client.

        Does nothing if the answer has ended.
        """
        self._engine.cancel(self._token_outputs.numbers)
        self._end("499")

    def _end(self, status: str) -> None:
        """Count and log the answer; calls after the first do nothing."""
        if self._status is not None:
            return
        self._status = status
        metrics, now = self._metrics, time.monotonic()
        metrics.requests.labels(self._endpoint, status).inc()
        metrics.duration.observe(now - self._began)
        if self._first is not None:
            metrics.first_token.observe(self._first - self._began)
            if self._tokens > 1:
                metrics.per_token.observe((now - self._first) / (self._tokens - 1))
        self._ended(status, self._tokens, now - self._began)
        _log.info(
            "%s %s: %d prompt tokens, %d generated, %.2f s",
            self._endpoint, status, sum(len(one.prompt) for one in self._requests),
            self._tokens, now - self._began,
        )  # fmt: skip


async def unless_disconnected(request: Request, work: Awaitable[T]) -> T:
    """Return the result of `work`; if the client leaves first, cancel `work`, raise `ApiError`."""
    task = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(left(request.receive))
    try:
        await asyncio.wait({task, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ApiError(499, "the client has left")
        return await task
    finally:
        for one in (task, leaving):
            one.cancel()
