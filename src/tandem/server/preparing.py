"""Turns a body into requests, in the prompt process, for the HTTP side.

Checks the body, writes and tokenizes its prompt, and creates the reply. The result includes errors,
and the part of each error that may be logged.
"""

import contextlib
import json
import pickle
import traceback
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from tandem.apis.answering import GenerationRequests
from tandem.apis.api import Api, Question, Reply
from tandem.apis.errors import ApiError, server_error
from tandem.apis.images import ImageReader
from tandem.apis.reading import read_body
from tandem.apis.responses.kept import NO_MESSAGES
from tandem.apis.schemas import RequestBody
from tandem.core.errors import TandemError
from tandem.dialects.format import ChatFormat, TemplateError
from tandem.engine.grammar_process import Writer
from tandem.engine.helper import Limits
from tandem.engine.messages import ModelInfo
from tandem.foreign_types import Tokenizer
from tandem.generate.request import Request
from tandem.server.endpoints import endpoints
from tandem.server.options import ServerOptions
from tandem.text.text_tokens import TextTooLongError

# Limits of a fork for a long body. A conversation of 32 MB with images takes some seconds.
LIMITS = Limits(processor_seconds=60.0, wall_seconds=600.0, memory_bytes=8 << 30)


class Setup(NamedTuple):
    """The settings for preparing bodies."""

    tokenizer: Tokenizer
    images: ImageReader | None
    options: ServerOptions
    names: tuple[str, ...]
    """The model's names for clients."""


class Job(NamedTuple):
    """A body for the prompt process, to turn into requests or to answer without the model."""

    endpoint: str
    raw: bytes
    info: ModelInfo | None
    room: int
    """The number of further requests that the engine accepts."""
    earlier: bytes | None = None
    """The stored conversation to continue, as JSON; None: not looked up yet."""
    limits: Limits = LIMITS


class Needs(NamedTuple):
    """The result of a job that must be repeated with more room or with an earlier conversation.

    The body needs room for `num_answers` requests. `earlier_id` is the response whose conversation
    the body continues; None: the body begins a conversation.
    """

    num_answers: int
    earlier_id: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """The requests of a body, and the reply to it."""

    requests: Sequence[Request]
    images: bytes | None
    """The requests' `ImagePrompt`, pickled because unpickling needs torch; None: no images."""
    writer: Writer | None
    """Writes the grammar that all requests follow; None: no grammar."""
    reply: Reply
    is_stream: bool
    num_dropped_turns: int
    texts: Sequence[str]
    """The prompts, to be logged; empty unless the server logs prompts."""


@dataclass(slots=True)
class Answered:
    """The result of a job."""

    found: Prepared | bytes | Needs | None = None
    """The prepared requests, or the whole answer as JSON, or what the job lacks; None: an error."""
    error: ApiError | None = None
    """The error to send to the client; None: the job succeeded."""
    other_model: str | None = None
    """The model name in the request if it is not a name of the served model; otherwise None."""
    ignored: Collection[str] = ()
    """Names of fields that were ignored."""
    problem: str | None = None
    """The traceback of an unexpected error, for the log."""


class Preparer:
    """Prepares bodies for one model."""

    def __init__(self, setup: Setup) -> None:
        """Build everything that bodies need, so that no fork has to build it again."""
        self._options, self._names = setup.options, setup.names
        requests = GenerationRequests(
            setup.tokenizer, context=setup.options.context,
            trims=setup.options.context_full == "trim", images=setup.images,
        )  # fmt: skip
        self._endpoints = endpoints(requests, setup.tokenizer, setup.names[0])
        # Initializes what is built on first use, before forking.
        with contextlib.suppress(TandemError):
            ChatFormat(setup.tokenizer).prompt([{"role": "user", "content": "x"}], (), {})

    def answer(self, job: Job) -> Answered:
        """Return the result of a job; never raises."""
        answered = Answered()
        try:
            answered.found = self._found(job, answered)
        except TandemError as error:
            answered.error = _as_api_error(error)
        except (ValueError, TypeError, KeyError, RecursionError, OverflowError, MemoryError) as e:
            what = "the request cannot be turned into a prompt"
            answered.error = ApiError(400, what, reason=f"{what} ({type(e).__name__})")
        except BaseException:  # a panic in Rust is not an `Exception`
            answered.problem = traceback.format_exc()
            answered.error = server_error("the server failed; its log says why")
        return answered

    def _found(self, job: Job, answered: Answered) -> Prepared | bytes | Needs:
        endpoint: Api[Any] | Question[Any] = self._endpoints[job.endpoint]
        read = read_body(endpoint.body, job.raw, is_strict=self._options.strict)
        body: RequestBody = read.body
        answered.other_model = self._other_model(body.model)
        answered.ignored = read.ignored
        if job.info is None:
            raise server_error("the model is being loaded; ask again soon", status=503)
        if isinstance(endpoint, Api) and (answer := endpoint.at_once(body)) is not None:
            return _as_json(answer)
        num_answers = body.num_answers if isinstance(endpoint, Api) else 0
        if num_answers > job.room or (body.earlier_id is not None and job.earlier is None):
            return Needs(num_answers, body.earlier_id)
        if isinstance(endpoint, Question):
            return _as_json(endpoint.answer(body, job.info, job.earlier or NO_MESSAGES))
        return self._prepared(endpoint, body, job.info, job.earlier or NO_MESSAGES)

    def _prepared(
        self, api: Api[Any], body: RequestBody, info: ModelInfo, earlier: bytes
    ) -> Prepared:
        generation_requests = api.requests(body, info, earlier)
        first = generation_requests[0]
        images = first.request.images
        return Prepared(
            requests=[replace(one.request, images=None) for one in generation_requests],
            images=None if images is None else pickle.dumps(images),
            writer=None if first.grammar is None else Writer.of(first.grammar),
            reply=api.reply(body, generation_requests, earlier),
            is_stream=body.is_stream,
            num_dropped_turns=first.num_dropped_turns,
            texts=[one.prompt_text for one in generation_requests]
            if self._options.log_prompts
            else (),
        )

    def _other_model(self, name: str | None) -> str | None:
        if not name or name in self._names:
            return None
        if not self._options.takes_any_name:
            raise no_model(name, self._names)
        return name


def _as_json(answer: dict[str, object]) -> bytes:
    return json.dumps(answer, ensure_ascii=False, separators=(",", ":")).encode()


def no_model(name: str, names: Sequence[str]) -> ApiError:
    """Return the error for a model that is not served."""
    known = " and ".join(repr(name) for name in names)
    return ApiError(
        404,
        f"there is no model {name[:200]!r} here; this server has {known}",
        param="model",
        code="model_not_found",
    )


def _as_api_error(error: TandemError) -> ApiError:
    if isinstance(error, ApiError):
        return error
    # A template's message may repeat the prompt; its reason does not.
    reason = error.reason if isinstance(error, TemplateError) else None
    code = "context_length_exceeded" if isinstance(error, TextTooLongError) else None
    return ApiError(400, str(error), reason=reason, code=code)
