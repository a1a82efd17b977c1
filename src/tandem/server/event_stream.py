"""A streamed response, as server-sent events or as JSON lines; it ends when its client leaves."""

import asyncio
import contextlib
import json
import logging
import time
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass

from fastapi.responses import Response
from starlette.types import Receive, Scope, Send

from tandem.apis.api import Event
from tandem.apis.errors import ApiError, server_error
from tandem.server.refusals import log_refusal

_log = logging.getLogger("tandem.server")
# Clients close streams that are silent for about a minute, as before the answer to a long prompt.
_SILENT_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class StreamForm:
    """How the events of a stream are encoded."""

    encode: Callable[[Event], bytes]
    done: bytes = b""
    """Sent after the last event."""
    media_type: str = "text/event-stream"
    life_sign: bytes = b": the prompt is being computed\n\n"
    """Sent while there are no events, as a keep-alive comment; clients ignore it."""


def json_line(data: Event) -> bytes:
    """Return an event as one line of JSON."""
    return json.dumps(data, ensure_ascii=False, separators=(",", ":")).encode() + b"\n"


def event(data: Event) -> bytes:
    """Return a server-sent event whose data are one line of JSON."""
    return b"data: " + json_line(data) + b"\n"


def named_event(data: Event) -> bytes:
    """Return a server-sent event like `event`, named by the `type` field of its data."""
    return f"event: {data['type']}\n".encode() + event(data)


EVENTS = StreamForm(event, done=b"data: [DONE]\n\n")
NAMED_EVENTS = StreamForm(named_event)
# A space is valid before a line. An empty line would not do: clients would parse it as JSON.
LINES = StreamForm(json_line, media_type="application/x-ndjson", life_sign=b" ")


class EventStream(Response):
    """Sends the bytes that an iterator yields; an error becomes the stream's last event."""

    def __init__(
        self,
        events: AsyncIterator[bytes],
        on_end: Callable[[], None] = lambda: None,
        headers: Mapping[str, str] | None = None,
        *,
        form: StreamForm = EVENTS,
        write_error: Callable[[ApiError], bytes] = lambda error: event(error.body),
    ) -> None:
        """Prepare to send `events`; `on_end` is always called, even if nothing was sent."""
        own = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__(headers={**own, **(headers or {})}, media_type=form.media_type)
        self._life_sign = form.life_sign
        del self.headers["content-length"]
        self._events = events
        self._on_end = on_end
        self._write_error = write_error
        self._latest = time.monotonic()  # time of the last send

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send until the events end or the client leaves."""
        sending = asyncio.ensure_future(self._send_all(scope, send))
        leaving = asyncio.ensure_future(left(receive))
        try:
            await asyncio.wait({sending, leaving}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._on_end()  # first, to free the slot at once
            leaving.cancel()
            sending.cancel()
            with contextlib.suppress(asyncio.CancelledError, OSError):
                await sending

    async def _show_life(self, send: Send) -> None:
        """Send the form's sign of life whenever nothing else was sent for `_SILENT_SECONDS`."""
        while True:
            silent = time.monotonic() - self._latest
            if silent >= _SILENT_SECONDS:
                await send(
                    {"type": "http.response.body", "body": self._life_sign, "more_body": True}
                )
                self._latest, silent = time.monotonic(), 0.0
            await asyncio.sleep(_SILENT_SECONDS - silent)

    async def _send_all(self, scope: Scope, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        showing = asyncio.ensure_future(self._show_life(send))
        try:
            async for data in self._with_error(scope):
                self._latest = time.monotonic()
                await send({"type": "http.response.body", "body": data, "more_body": True})
        finally:
            showing.cancel()
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _with_error(self, scope: Scope) -> AsyncIterator[bytes]:
        try:
            async for data in self._events:
                yield data
        except ApiError as error:
            log_refusal(scope, error)
            yield self._write_error(error)
        except Exception:
            _log.exception("a stream failed")
            yield self._write_error(server_error("the server failed; its log says why"))


async def left(receive: Receive) -> None:
    """Return when the client has left."""
    while (await receive())["type"] != "http.disconnect":
        pass
