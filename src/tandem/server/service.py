"""What the routes share: one engine, one model, and the way of a request from body to answer."""

import asyncio
import contextlib
import functools
import logging
import math
import time
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from typing import TypeVar

from fastapi import Request
from fastapi.responses import JSONResponse, Response
from starlette.requests import ClientDisconnect

from tandem.apis.answering import GenerationRequest, GenerationRequests
from tandem.apis.api import Api, Reply
from tandem.apis.errors import ApiError, server_error
from tandem.apis.images import ImageReader
from tandem.apis.reading import ReadBody, known_names, read_body
from tandem.apis.schemas import Asked
from tandem.checkpoint.text_tokens import TextTooLongError
from tandem.core.errors import TandemError
from tandem.core.registry import nearest_names
from tandem.dialects.format import TemplateError
from tandem.engine.grammar_process import Tables
from tandem.engine.messages import ModelInfo
from tandem.foreign_types import Tokenizer
from tandem.server.api_keys import OWNER
from tandem.server.engine_client import EngineClient
from tandem.server.event_stream import EventStream
from tandem.server.grammars import Grammars
from tandem.server.metrics import Metrics
from tandem.server.options import ServerOptions
from tandem.server.refusals import plain
from tandem.server.running_answer import RunningAnswer, unless_gone

_log = logging.getLogger("tandem.server")
_KEEP_ALIVE_SECONDS = 15.0
_DEADLINE = "X-Tandem-Deadline"
# A shorter body is read sooner than a thread begins.
_SHORT_BODY_BYTES = 16 << 10
# Longer ones wait for each other and not for short ones.
_LONG_BODY_BYTES = 64 << 10
# So many names of ignored fields and of other models are logged, each once.
_MOST_NOTED = 256

T = TypeVar("T")
B = TypeVar("B", bound=Asked)
Work = Callable[[B, ModelInfo], dict[str, object]]


class Server:
    """The engine, the generation requests and the counts."""

    def __init__(
        self,
        engine: EngineClient,
        tokenizer: Tokenizer,
        options: ServerOptions,
        model: str,
        images: ImageReader | None = None,
    ) -> None:
        """Serve `model`, by that name unless the options give it others."""
        self.engine = engine
        self.tokenizer = tokenizer
        self.options = options
        self.names = options.names(model)
        self.model = self.names[0]
        self.metrics = Metrics(engine)
        self.grammars = Grammars(self._tables)
        self.generation_requests = GenerationRequests(
            tokenizer, context=options.context, trims=options.context_full == "trim",
            images=images,
        )  # fmt: skip
        self.max_body_bytes = options.max_body_bytes(has_images=images is not None)
        self._noted: set[str] = set()
        # One thread each: every other one that runs Python makes the event loop wait for its turn.
        self._for_short = ThreadPoolExecutor(1, "tandem-short-bodies")
        self._for_long = ThreadPoolExecutor(1, "tandem-long-bodies")
        self.began = int(time.time())

    # ---- answers ---------------------------------------------------------------------------------

    async def answer(self, api: Api[B], request: Request) -> Response:
        """Answer a request of one API, whole or as a stream."""
        with self._counted(api.endpoint):
            body, info = await self._read(request, api.body)
            self.engine.require_room(body.num_answers)
            generation_requests = await self._in_thread(request, api.requests, body, info)
            writer = generation_requests[0].grammar
            grammar = None
            if writer is not None:
                grammar = await unless_gone(request, self.grammars.build(writer))
            answer = RunningAnswer(
                self.engine, self.metrics, self.options,
                endpoint=api.endpoint, generation_requests=generation_requests,
                grammar=grammar,
                owner=body.owner,
                seconds=_deadline(request),
            )  # fmt: skip
        reply = api.reply(body, generation_requests)
        headers = trimming_headers(generation_requests)
        if body.stream:
            return EventStream(
                _events(api, reply, answer), answer.cancel, headers,
                write_error=lambda error: api.encode(reply.failed(error)),
            )  # fmt: skip

        async def collect() -> None:
            async for index, token_output in answer:
                reply.take(index, token_output)

        try:
            await unless_gone(request, collect())
        finally:
            answer.cancel()
        return JSONResponse(reply.whole(), headers=headers)

    async def tell(
        self, endpoint: str, kind: type[B], work: "Work[B]", request: Request
    ) -> Response:
        """Answer a request with what some work on its body returns."""
        with self._counted(endpoint):
            body, info = await self._read(request, kind)
            found = await self._in_thread(request, work, body, info)
        self.metrics.requests.labels(endpoint, "200").inc()
        return JSONResponse(found)

    def _require_info(self) -> ModelInfo:
        if self.engine.info is None:
            raise server_error("the model is being loaded; ask again soon", status=503)
        return self.engine.info

    def _tables(self) -> Tables:
        """Return what the grammar process builds its tables of."""
        info = self._require_info()
        return Tables.of(self.tokenizer, info.vocabulary, info.end_ids)

    @contextlib.contextmanager
    def _counted(self, endpoint: str) -> Iterator[None]:
        """Count what fails before an answer begins; what begins counts itself."""
        try:
            yield
        except ApiError as error:
            self.metrics.requests.labels(endpoint, str(error.status)).inc()
            raise
        except TandemError as error:
            self.metrics.requests.labels(endpoint, "400").inc()
            # A template's message repeats the prompt.
            reason = error.reason if isinstance(error, TemplateError) else None
            code = "context_length_exceeded" if isinstance(error, TextTooLongError) else None
            raise ApiError(400, str(error), reason=reason, code=code) from error

    async def _read(self, request: Request, kind: type[B]) -> tuple[B, ModelInfo]:
        """Return the checked body, and the model that it may ask for."""
        try:
            raw = await request.body()
        except ClientDisconnect:
            raise ApiError(499, "the client has left") from None
        reading = functools.partial(read_body, kind, raw, is_strict=self.options.strict)
        is_short = len(raw) <= _SHORT_BODY_BYTES
        found = reading() if is_short else await self._in_thread(request, reading)
        found.body.belong_to(self.owner_of(request))
        self._require_model(found.body.model)
        self._note_ignored(found)
        return found.body, self._require_info()

    def owner_of(self, request: Request) -> bytes:
        """Return whose traces a request may find: all requests', unless keys are isolated."""
        owner: bytes = request.scope.get("state", {}).get(OWNER, b"")
        return owner if self.options.isolate_keys else b""

    def _require_model(self, name: str | None) -> None:
        if not name or name in self.names:
            return
        if not self.options.takes_any_name:
            raise self._no_model(name)
        if self._is_news(f"model {name}"):
            _log.info("requests for model %s are answered by %r", plain(name, 100), self.model)

    def _no_model(self, name: str) -> ApiError:
        names = " and ".join(repr(name) for name in self.names)
        return ApiError(
            404,
            f"there is no model {name[:200]!r} here; this server has {names}",
            param="model",
            code="model_not_found",
        )

    def _note_ignored(self, found: ReadBody[B]) -> None:
        """Log the fields of a request that are ignored, with the field that may have been meant."""
        news = [name for name in found.ignored if self._is_news(f"field {name}")]
        if news:
            known = sorted(known_names(type(found.body)))
            names = (_with_hint(plain(name, 64), known) for name in sorted(news))
            _log.warning("ignored from now on: the fields %s of requests", ", ".join(names))

    def _is_news(self, what: str) -> bool:
        """Tell whether something is to be logged: once, and not without end."""
        is_news = what not in self._noted and len(self._noted) < _MOST_NOTED
        if is_news:
            self._noted.add(what)
        return is_news

    async def _in_thread(self, request: Request, function: Callable[..., T], *args: object) -> T:
        """Run what may take long, such as writing a long prompt, beside the event loop."""
        is_long = len(await request.body()) > _LONG_BODY_BYTES
        loop = asyncio.get_running_loop()
        pool = self._for_long if is_long else self._for_short
        try:
            return await loop.run_in_executor(pool, function, *args)
        except TandemError:
            raise
        except (ValueError, TypeError, KeyError, RecursionError, OverflowError) as error:
            _log.warning("a request could not be read (%s)", type(error).__name__)
            raise ApiError(400, "the request cannot be turned into a prompt") from error

    # ---- the rest --------------------------------------------------------------------------------

    def models(self) -> dict[str, object]:
        """Return the list of models: one, by each of its names; as OpenAI and Anthropic have it."""
        page = {"has_more": False, "first_id": self.names[0], "last_id": self.names[-1]}
        data = [self.one_model(name) for name in self.names]
        return {"object": "list", "data": data, **page}

    def one_model(self, name: str) -> dict[str, object]:
        """Return the model object; 404 for another name."""
        if name not in self.names:
            raise self._no_model(name)
        info = self.engine.info
        context = self.generation_requests.limit(info) if info is not None else None
        return {
            "id": name,
            "object": "model",
            "created": self.began,
            "owned_by": "tandem",
            "max_model_len": context,
            "context_length": context,
            "capabilities": self.generation_requests.capabilities(info),
            "type": "model",
            "display_name": name,
            "created_at": datetime.fromtimestamp(self.began, UTC).isoformat(),
            "max_input_tokens": context,
        }

    def live(self) -> Response:
        """Stream snapshots for the page."""
        return EventStream(self._snapshots())

    async def _snapshots(self) -> AsyncIterator[bytes]:
        async with self.engine.watching() as snapshots:
            while True:
                try:
                    async with asyncio.timeout(_KEEP_ALIVE_SECONDS):
                        snapshot = await snapshots.get()
                    yield b"data: " + snapshot.encode() + b"\n\n"
                except TimeoutError:
                    yield b": nothing new\n\n"


async def _events(api: Api[B], reply: Reply, answer: RunningAnswer) -> AsyncIterator[bytes]:
    """Yield what a stream sends: all that follows from one token at once."""
    for event in reply.first_events():
        yield api.encode(event)
    async for index, token_output in answer:
        if written := b"".join(map(api.encode, reply.take(index, token_output))):
            yield written
    if written := b"".join(map(api.encode, reply.last_events())) + api.done:
        yield written


def _deadline(request: Request) -> float | None:
    """Return the seconds after which a client wants no answer any more; None: it does not say."""
    given = request.headers.get(_DEADLINE)
    try:
        seconds = None if given is None else float(given)
    except ValueError:
        seconds = 0.0
    if seconds is not None and not 0 < seconds < math.inf:
        raise ApiError(400, f"{_DEADLINE} is no number of seconds above 0", param=_DEADLINE)
    return seconds


def _with_hint(name: str, known: list[str]) -> str:
    hint = nearest_names(name, known)
    return f"{name!r} ({hint})" if hint.startswith("did you mean") else repr(name)


def trimming_headers(generation_requests: list[GenerationRequest]) -> dict[str, str]:
    """Say how many turns of a conversation were dropped, and log it."""
    num_turns = generation_requests[0].num_dropped_turns
    if not num_turns:
        return {}
    _log.info("a conversation did not fit: %d of its oldest turns were dropped", num_turns)
    return {"X-Tandem-Dropped-Turns": str(num_turns)}
