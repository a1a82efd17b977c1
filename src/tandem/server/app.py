"""The HTTP side: routes, checks and errors. Knows neither tensors nor how tokens are made."""

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any, TypeVar

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from tandem.core.errors import TandemError
from tandem.core.registry import nearest_names
from tandem.foreign_types import Tokenizer
from tandem.server.answering import GenerationRequest, GenerationRequests
from tandem.server.engine_client import EngineClient
from tandem.server.errors import ApiError, server_error
from tandem.server.event_stream import EventStream
from tandem.server.gate import Gate
from tandem.server.messages import ModelInfo
from tandem.server.metrics import Metrics
from tandem.server.openapi import describe, described_body, described_errors
from tandem.server.options import ServerOptions
from tandem.server.page_files import add_page
from tandem.server.reading import ReadBody, known_names, read_body
from tandem.server.refusals import log_refusal, plain
from tandem.server.replies import DONE, ChatReply, CompletionReply, event
from tandem.server.running_answer import RunningAnswer
from tandem.server.schemas import ChatRequest, CompletionRequest, Sampling

_log = logging.getLogger("tandem.server")
_KEEP_ALIVE_SECONDS = 15.0
# So many names of ignored fields and of other models are logged, each once.
_MOST_NOTED = 256

T = TypeVar("T")
B = TypeVar("B", bound=Sampling)


class Server:
    """What the routes share: the engine, the generation requests and the counts."""

    def __init__(
        self,
        engine: EngineClient,
        tokenizer: Tokenizer,
        options: ServerOptions,
        model: str,
    ) -> None:
        """Serve `model`, by that name unless the options give it others."""
        self.engine = engine
        self.tokenizer = tokenizer
        self.options = options
        self.names = options.names(model)
        self.model = self.names[0]
        self.metrics = Metrics(engine)
        self.generation_requests = GenerationRequests(
            tokenizer, context=options.context, trims=options.context_full == "trim"
        )
        self._noted: set[str] = set()
        self.began = int(time.time())

    # ---- answers ---------------------------------------------------------------------------------

    async def chat(self, request: Request) -> Response:
        """Answer /v1/chat/completions."""
        with self._counted("chat"):
            body, info = await self._read(request, ChatRequest)
            generation_requests = await self._in_thread(self.generation_requests.chat, body, info)
            answer = self._begin("chat", generation_requests)
        reply = ChatReply(
            generation_requests,
            self.model,
            self.tokenizer,
            has_running_usage=_wants_running_usage(body),
        )
        headers = trimming_headers(generation_requests)
        if body.stream:
            return EventStream(self._chat_events(body, reply, answer), answer.cancel, headers)

        async def collect() -> None:
            async for index, token_output in answer:
                reply.take(index, token_output)

        await answer.unless_gone(request, collect())
        return JSONResponse(reply.whole(), headers=headers)

    async def _chat_events(
        self, body: ChatRequest, reply: ChatReply, answer: RunningAnswer
    ) -> AsyncIterator[bytes]:
        for chunk in reply.first_chunks():
            yield event(chunk)
        async for index, token_output in answer:
            chunks = b"".join([event(chunk) for chunk in reply.take(index, token_output)])
            if chunks:
                yield chunks
        if _wants_usage(body):
            yield event(reply.usage_chunk())
        yield DONE

    async def completions(self, request: Request) -> Response:
        """Answer /v1/completions."""
        with self._counted("completions"):
            body, info = await self._read(request, CompletionRequest)
            generation_requests = await self._in_thread(
                self.generation_requests.completions, body, info
            )
            answer = self._begin("completions", generation_requests)
        reply = CompletionReply(
            generation_requests, self.model, self.tokenizer, body.n or 1, _wants_running_usage(body)
        )
        if body.stream:
            return EventStream(self._completion_events(body, reply, answer), answer.cancel)

        async def collect() -> None:
            async for index, token_output in answer:
                reply.take(index, token_output)

        await answer.unless_gone(request, collect())
        return JSONResponse(reply.whole())

    async def _completion_events(
        self, body: CompletionRequest, reply: CompletionReply, answer: RunningAnswer
    ) -> AsyncIterator[bytes]:
        async for index, token_output in answer:
            chunk = reply.take(index, token_output)
            if chunk is not None:
                yield event(chunk)
        if _wants_usage(body):
            yield event(reply.usage_chunk())
        yield DONE

    def _begin(self, endpoint: str, generation_requests: list[GenerationRequest]) -> RunningAnswer:
        return RunningAnswer(
            self.engine,
            self.metrics,
            self.options,
            endpoint=endpoint,
            generation_requests=generation_requests,
        )

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
            raise ApiError(400, str(error)) from error

    async def _read(self, request: Request, kind: type[B]) -> tuple[B, ModelInfo]:
        """Return the checked body, and the model that it may ask for."""
        try:
            raw = await request.body()
        except ClientDisconnect:
            raise ApiError(499, "the client has left") from None
        found = read_body(kind, raw, is_strict=self.options.strict)
        self._require_model(found.body.model)
        self._note_ignored(found)
        info = self.engine.info
        if info is None:
            raise server_error("the model is being loaded; ask again soon", status=503)
        return found.body, info

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

    def _note_ignored(self, found: ReadBody[Any]) -> None:
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

    async def _in_thread(self, function: Callable[..., T], *args: object) -> T:
        """Run what may take long, such as writing a long prompt, beside the event loop."""
        try:
            return await asyncio.to_thread(function, *args)
        except TandemError:
            raise
        except (
            ValueError,
            TypeError,
            KeyError,
            RecursionError,
            UnicodeError,
            OverflowError,
        ) as error:
            _log.warning("a request could not be read (%s)", type(error).__name__)
            raise ApiError(400, "the request cannot be turned into a prompt") from error

    # ---- the rest --------------------------------------------------------------------------------

    def models(self) -> dict[str, object]:
        """Return the list of models: one, by each of its names."""
        return {"object": "list", "data": [self.one_model(name) for name in self.names]}

    def one_model(self, name: str) -> dict[str, object]:
        """Return the model object; 404 for another name."""
        if name not in self.names:
            raise self._no_model(name)
        info = self.engine.info
        return {
            "id": name,
            "object": "model",
            "created": self.began,
            "owned_by": "tandem",
            "max_model_len": None if info is None else info.context,
        }

    def live(self) -> Response:
        """Stream snapshots for the page."""
        return EventStream(self._snapshots())

    async def _snapshots(self) -> AsyncIterator[bytes]:
        async with self.engine.watching() as snapshots:
            while True:
                try:
                    snapshot = await asyncio.wait_for(snapshots.get(), _KEEP_ALIVE_SECONDS)
                    yield b"data: " + snapshot.encode() + b"\n\n"
                except TimeoutError:
                    yield b": nothing new\n\n"


def _with_hint(name: str, known: list[str]) -> str:
    hint = nearest_names(name, known)
    return f"{name!r} ({hint})" if hint.startswith("did you mean") else repr(name)


def _wants_usage(body: Sampling) -> bool:
    return body.stream_options is not None and body.stream_options.include_usage


def _wants_running_usage(body: Sampling) -> bool:
    return _wants_usage(body) and bool(
        body.stream_options and body.stream_options.continuous_usage_stats
    )


def trimming_headers(generation_requests: list[GenerationRequest]) -> dict[str, str]:
    """Say how many turns of a conversation were dropped, and log it."""
    num_turns = generation_requests[0].num_dropped_turns
    if not num_turns:
        return {}
    _log.info("a conversation did not fit: %d of its oldest turns were dropped", num_turns)
    return {"X-Tandem-Dropped-Turns": str(num_turns)}


def create_app(
    server: Server,
    *,
    api_key: str | None,
    allowed_hosts: list[str] | None,
    lifespan: Any = None,
) -> FastAPI:
    """Return the application. `allowed_hosts`: names by which it may be called; None: any."""
    app = FastAPI(title="Tandem", docs_url=None, redoc_url=None, lifespan=lifespan)
    options = server.options
    app.add_middleware(
        Gate,
        api_key=api_key,
        allowed_hosts=allowed_hosts,
        max_body_bytes=options.max_body_bytes,
        allow_origin=options.allow_origin,
    )
    app.add_exception_handler(TandemError, _tell)
    app.add_exception_handler(HTTPException, _tell_http)
    app.add_exception_handler(Exception, _tell_unexpected)
    _add_api(app, server)
    _add_rest(app, server)
    add_page(app)
    describe(app, [ChatRequest, CompletionRequest])
    return app


def _add_api(app: FastAPI, server: Server) -> None:
    @app.post("/v1/chat/completions", **described_body(ChatRequest))
    async def chat(request: Request) -> Response:
        """Answer a conversation."""
        return await server.chat(request)

    @app.post("/v1/completions", **described_body(CompletionRequest))
    async def completions(request: Request) -> Response:
        """Go on with a text."""
        return await server.completions(request)

    @app.post("/v1/embeddings", status_code=404, responses=described_errors(401, 413, 415))
    async def embeddings() -> Response:
        """Refuse: a model that writes has no embeddings to give."""
        raise ApiError(
            404,
            "this server's model writes text and has no embeddings; use an embedding server",
            code="unsupported_endpoint",
        )

    @app.get("/v1/models")
    async def models() -> Response:
        """List the model."""
        return JSONResponse(server.models())

    @app.get("/v1/models/{name:path}", responses=described_errors(401, 404))
    async def model(name: str) -> Response:
        """Describe the model."""
        return JSONResponse(server.one_model(name))


def _add_rest(app: FastAPI, server: Server) -> None:
    @app.get("/health")
    async def health() -> Response:
        """Say that the server runs."""
        return JSONResponse({"status": "ok"})

    @app.get("/ready", responses=described_errors(503))
    async def ready() -> Response:
        """Say whether a request would be answered now."""
        if server.engine.is_ready:
            return JSONResponse({"status": "ready"})
        return JSONResponse({"status": "not ready"}, 503, {"Retry-After": "2"})

    @app.get("/metrics", response_class=PlainTextResponse)
    async def metrics() -> Response:
        """Show what Prometheus reads."""
        return Response(server.metrics.text(), media_type="text/plain; version=0.0.4")

    @app.get("/live", include_in_schema=False)
    async def live() -> Response:
        return server.live()


async def _tell(request: Request, error: Exception) -> Response:
    answer = error if isinstance(error, ApiError) else ApiError(400, str(error))
    log_refusal(request.scope, answer)
    return JSONResponse(answer.body, answer.status, answer.headers)


async def _tell_http(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    message = f"{request.method} {request.url.path[:200]}: {error.detail}"
    answer = ApiError(
        error.status_code, message, code="not_found" if error.status_code == 404 else None,
        reason=str(error.detail),
    )  # fmt: skip
    log_refusal(request.scope, answer)
    return JSONResponse(answer.body, answer.status, error.headers)


async def _tell_unexpected(request: Request, error: Exception) -> Response:
    answer = server_error("the server failed; its log says why")
    log_refusal(request.scope, answer)
    return JSONResponse(answer.body, 500)
