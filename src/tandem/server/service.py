"""The server behind the routes: one engine, one model, and the steps from a body to its answer."""

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import AsyncIterator, Collection, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime

from fastapi import Request
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel
from starlette.requests import ClientDisconnect

from tandem.apis.answering import GenerationRequests
from tandem.apis.api import Reply, Surroundings
from tandem.apis.errors import ApiError
from tandem.apis.images import ImageReader
from tandem.apis.reading import known_names
from tandem.apis.responses.kept import KeptResponses
from tandem.core.errors import TandemError
from tandem.core.registry import nearest_names
from tandem.engine.grammar_process import Tables
from tandem.foreign_types import Tokenizer
from tandem.server.api_keys import OWNER
from tandem.server.engine_client import EngineClient
from tandem.server.event_stream import EventStream, StreamForm
from tandem.server.grammars import Grammars
from tandem.server.key_limits import KeyLimits, UseLog
from tandem.server.metrics import Metrics
from tandem.server.options import ServerOptions
from tandem.server.preparing import Job, Needs, Prepared, Setup, no_model
from tandem.server.prompts import Prompts
from tandem.server.refusals import plain
from tandem.server.running_answer import RunningAnswer, unless_disconnected

_log = logging.getLogger("tandem.server")
_KEEP_ALIVE_SECONDS = 15.0
_DEADLINE = "X-Tandem-Deadline"
# At most so many names of ignored fields and of other models are logged, each once.
_MOST_NOTED = 256


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One endpoint: its name, the schema of its bodies, and the format of its streams."""

    name: str
    """The endpoint's name in the metrics."""
    body: type[BaseModel]
    form: StreamForm | None = None
    """The format of a stream; None: the endpoint never streams."""


class Server:
    """One served model: its engine, helper processes, metrics, limits and stored responses."""

    def __init__(
        self,
        engine: EngineClient,
        tokenizer: Tokenizer,
        options: ServerOptions,
        model: str,
        images: ImageReader | None = None,
    ) -> None:
        """Prepare to serve `model`, under its own name unless the options give other names."""
        self.engine = engine
        self.tokenizer = tokenizer
        self.options = options
        self.names = options.names(model)
        self.model = self.names[0]
        self.metrics = Metrics(engine)
        self.grammars = Grammars(self._tables)
        self.prompts = Prompts(Setup(tokenizer, images, options, self.names))
        self._about = GenerationRequests(tokenizer, context=options.context, images=images)
        self._kept: dict[bytes, KeptResponses] = {}
        self.max_body_bytes = options.max_body_bytes(has_images=images is not None)
        self._noted: set[str] = set()
        self.key_limits, self._use = KeyLimits(options), UseLog(options.use_log)
        self.began = int(time.time())

    # ---- answers ---------------------------------------------------------------------------------

    async def answer(self, endpoint: Endpoint, request: Request) -> Response:
        """Return the response to a request: an object or a stream, with or without the model."""
        with self._counted(endpoint.name):
            found = await self._found(endpoint, request)
            if not isinstance(found, Prepared):
                self.metrics.requests.labels(endpoint.name, "200").inc()
                return Response(found, media_type="application/json")
            grammar = None
            if found.writer is not None:
                grammar = await unless_disconnected(request, self.grammars.build(found.writer))
            answer = await self._begun(endpoint, request, found, grammar)
        reply, headers = found.reply, trimming_headers(found.num_dropped_turns)
        keep = self.kept_of(self.owner_of(request)).put
        reply.arrive(Surroundings(lambda token: str(self.tokenizer.decode([token])), keep))
        if found.is_stream and endpoint.form is not None:
            return _stream(endpoint.form, reply, answer, headers)

        async def collect() -> None:
            async for index, token_output in answer:
                reply.take(index, token_output)

        try:
            await unless_disconnected(request, collect())
        finally:
            answer.cancel()
        return JSONResponse(reply.whole(), headers=headers)

    async def _begun(
        self, endpoint: Endpoint, request: Request, prepared: Prepared, grammar: str | None
    ) -> RunningAnswer:
        """Submit a body's requests once the limits of its API key allow it; return the answer."""
        key, number, seconds = key_of(request), len(prepared.requests), _deadline(request)
        prompt_tokens = sum(len(one.prompt) for one in prepared.requests)
        await unless_disconnected(request, self.key_limits.enter(key, number))

        def ended(status: str, generated_tokens: int, seconds: float) -> None:
            self.key_limits.leave(key, number, prompt_tokens + generated_tokens)
            self._use.write(
                key, endpoint.name, status, prompt_tokens=prompt_tokens,
                generated_tokens=generated_tokens, seconds=seconds,
            )  # fmt: skip

        try:
            return RunningAnswer(
                self.engine, self.metrics, self.options,
                endpoint=endpoint.name, prepared=prepared,
                grammar=grammar,
                owner=self.owner_of(request),
                seconds=seconds,
                ended=ended,
            )  # fmt: skip
        except BaseException:
            self.key_limits.leave(key, number, 0)
            raise

    async def _found(self, endpoint: Endpoint, request: Request) -> Prepared | bytes:
        """Return what the prompt process makes of a body: requests, or the whole answer as JSON."""
        try:
            raw = await request.body()
        except ClientDisconnect:
            raise ApiError(499, "the client has left") from None
        job = Job(endpoint.name, raw, self.engine.info, self.engine.room)
        while True:
            answered = await unless_disconnected(request, self.prompts.ask(job))
            self._note(endpoint, answered.other_model, answered.ignored)
            if answered.problem is not None:
                _log.error("a request failed in the prompt process: %s", answered.problem)
            if answered.error is not None:
                raise answered.error
            if not isinstance(answered.found, Needs):
                assert answered.found is not None
                return answered.found
            job = self._with_needs(job, answered.found, self.owner_of(request))

    def _with_needs(self, job: Job, needs: Needs, owner: bytes) -> Job:
        """Return the job with the room and the earlier conversation that its body needs.

        Raises `ApiError` if there is too little room, or if the conversation is not kept.
        """
        if needs.num_answers:
            self.engine.require_room(needs.num_answers)
        kept = self.kept_of(owner)
        return job._replace(
            info=self.engine.info,
            room=max(needs.num_answers, self.engine.room),
            earlier=None if needs.earlier_id is None else kept.conversation(needs.earlier_id),
        )

    def kept_of(self, owner: bytes) -> KeptResponses:
        """Return the kept responses of an owner; each owner has its own limit."""
        return self._kept.setdefault(owner, KeptResponses())

    def _tables(self) -> Tables:
        """Return the inputs of the grammar process's tables."""
        info = self.engine.info
        assert info is not None  # only bodies prepared for the model have grammars
        return Tables.of(self.tokenizer, info.vocabulary, info.end_ids)

    @contextlib.contextmanager
    def _counted(self, endpoint: str) -> Iterator[None]:
        """Count errors in the `with` body; a `RunningAnswer` counts later errors itself."""
        try:
            yield
        except ApiError as error:
            self.metrics.requests.labels(endpoint, str(error.status)).inc()
            raise
        except TandemError:
            self.metrics.requests.labels(endpoint, "400").inc()
            raise

    def start(self) -> None:
        """Start the prompt process, so that it is ready when the model is."""
        self.prompts.process.start()

    def close(self) -> None:
        """End the helper processes, and close the log of use."""
        self.prompts.process.close()
        self.grammars.process.close()
        self._use.close()

    def owner_of(self, request: Request) -> bytes:
        """Return the owner whose stored data a request may read.

        Unless keys are isolated, all requests have the same owner.
        """
        return key_of(request) if self.options.isolate_keys else b""

    def _note(self, endpoint: Endpoint, model: str | None, ignored: Collection[str]) -> None:
        """Log, once per name, another model's name in a request and the names of ignored fields."""
        if model is not None and self._is_news(f"model {model}"):
            _log.info("requests for model %s are answered by %r", plain(model, 100), self.model)
        news = [name for name in ignored if self._is_news(f"field {name}")]
        if news:
            known = sorted(known_names(endpoint.body))
            names = (_with_hint(plain(name, 64), known) for name in sorted(news))
            _log.warning("ignored from now on: the fields %s of requests", ", ".join(names))

    def _is_news(self, what: str) -> bool:
        """Remember `what`; tell whether it is new. At the limit `_MOST_NOTED`, nothing is new."""
        is_news = what not in self._noted and len(self._noted) < _MOST_NOTED
        if is_news:
            self._noted.add(what)
        return is_news

    # ---- the rest --------------------------------------------------------------------------------

    def models(self) -> dict[str, object]:
        """Return the model list of OpenAI's and Anthropic's APIs: one entry for each name."""
        page = {"has_more": False, "first_id": self.names[0], "last_id": self.names[-1]}
        data = [self.one_model(name) for name in self.names]
        return {"object": "list", "data": data, **page}

    def one_model(self, name: str) -> dict[str, object]:
        """Return the model object; raises `ApiError` with status 404 for another name."""
        if name not in self.names:
            raise no_model(name, self.names)
        info, context = self.engine.info, self.context
        return {
            "id": name,
            "object": "model",
            "created": self.began,
            "owned_by": "tandem",
            "max_model_len": context,
            "context_length": context,
            "capabilities": self._about.capabilities(info),
            "type": "model",
            "display_name": name,
            "created_at": datetime.fromtimestamp(self.began, UTC).isoformat(),
            "max_input_tokens": context,
        }

    @property
    def context(self) -> int | None:
        """The most tokens of prompt and answer together; None: no limit, or none known yet."""
        info = self.engine.info
        return None if info is None else self._about.limit(info)

    def live(self) -> Response:
        """Return a stream of live snapshots for the page."""
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


def _stream(
    form: StreamForm, reply: Reply, answer: RunningAnswer, headers: Mapping[str, str]
) -> EventStream:
    """Return the stream of an answer; the events of one token are sent together."""
    encode = form.encode

    async def events() -> AsyncIterator[bytes]:
        for event in reply.first_events():
            yield encode(event)
        async for index, token_output in answer:
            if written := b"".join(map(encode, reply.take(index, token_output))):
                yield written
        if written := b"".join(map(encode, reply.last_events())) + form.done:
            yield written

    def write_error(error: ApiError) -> bytes:
        return encode(reply.failed(error))

    return EventStream(events(), answer.cancel, headers, form=form, write_error=write_error)


def key_of(request: Request) -> bytes:
    """Return an identifier of a request's API key; empty on a server without keys."""
    owner: bytes = request.scope.get("state", {}).get(OWNER, b"")
    return owner


def _deadline(request: Request) -> float | None:
    """Return the seconds that a request's deadline header allows; None without the header.

    Raises `ApiError` if the header is not a number above 0.
    """
    deadline = request.headers.get(_DEADLINE)
    try:
        seconds = None if deadline is None else float(deadline)
    except ValueError:
        seconds = 0.0
    if seconds is not None and not 0 < seconds < math.inf:
        raise ApiError(400, f"{_DEADLINE} is not a number of seconds above 0", param=_DEADLINE)
    return seconds


def _with_hint(name: str, known: list[str]) -> str:
    hint = nearest_names(name, known)
    return f"{name!r} ({hint})" if hint.startswith("did you mean") else repr(name)


def trimming_headers(num_turns: int) -> dict[str, str]:
    """Log how many turns were dropped, and return a header with that number; {} if none were."""
    if not num_turns:
        return {}
    _log.info("a conversation did not fit: %d of its oldest turns were dropped", num_turns)
    return {"X-Tandem-Dropped-Turns": str(num_turns)}
