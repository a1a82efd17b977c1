"""The HTTP side: routes and errors. Knows neither tensors nor how tokens are made."""

from collections.abc import Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response
from pydantic import BaseModel
from starlette.exceptions import HTTPException

from tandem.apis.anthropic.schemas import CountTokensRequest, MessagesRequest
from tandem.apis.errors import ApiError, server_error
from tandem.apis.responses.schemas import CountRequest, ResponsesRequest
from tandem.apis.schemas import ChatRequest, CompletionRequest
from tandem.core.errors import TandemError
from tandem.server.anthropic_api import messages_api
from tandem.server.gate import Gate
from tandem.server.openai_apis import chat_api, completion_api
from tandem.server.openapi import describe, described_body, described_errors
from tandem.server.page_files import add_page
from tandem.server.refusals import log_refusal
from tandem.server.responses_api import ResponsesApi
from tandem.server.service import Server
from tandem.server.tokens import (
    DetokenizeRequest,
    TokenizeRequest,
    answer_detokenize,
    answer_tokenize,
)

BODIES: list[type[BaseModel]] = [
    ChatRequest, CompletionRequest, ResponsesRequest, CountRequest, MessagesRequest,
    CountTokensRequest, TokenizeRequest, DetokenizeRequest,
]  # fmt: skip


def create_app(
    server: Server,
    *,
    api_keys: Sequence[str] = (),
    allowed_hosts: list[str] | None,
    lifespan: Any = None,
) -> FastAPI:
    """Return the application. `allowed_hosts`: names by which it may be called; None: any."""
    app = FastAPI(title="Tandem", docs_url=None, redoc_url=None, lifespan=lifespan)
    options = server.options
    app.add_middleware(
        Gate,
        api_keys=api_keys,
        allowed_hosts=allowed_hosts,
        max_body_bytes=server.max_body_bytes,
        allow_origin=options.allow_origin,
    )
    app.add_exception_handler(TandemError, _tell)
    app.add_exception_handler(HTTPException, _tell_http)
    app.add_exception_handler(Exception, _tell_unexpected)
    _add_openai(app, server)
    _add_responses(app, server)
    _add_anthropic(app, server)
    _add_models(app, server)
    _add_tokens(app, server)
    _add_rest(app, server)
    add_page(app)
    describe(app, BODIES)
    return app


def _add_openai(app: FastAPI, server: Server) -> None:
    chats, texts = chat_api(server), completion_api(server)

    @app.post("/v1/chat/completions", **described_body(ChatRequest))
    async def chat(request: Request) -> Response:
        """Answer a conversation."""
        return await server.answer(request, chats)

    @app.post("/v1/completions", **described_body(CompletionRequest))
    async def completions(request: Request) -> Response:
        """Go on with a text."""
        return await server.answer(request, texts)

    @app.post("/v1/embeddings", status_code=404, responses=described_errors(401, 413, 415))
    async def embeddings() -> Response:
        """Refuse: a model that writes has no embeddings to give."""
        raise ApiError(
            404,
            "this server's model writes text and has no embeddings; use an embedding server",
            code="unsupported_endpoint",
        )


def _add_responses(app: FastAPI, server: Server) -> None:
    api = ResponsesApi(server)

    @app.post("/v1/responses", **described_body(ResponsesRequest))
    async def responses(request: Request) -> Response:
        """Answer a conversation of the Responses API."""
        return await server.answer(request, api.responses)

    @app.post("/v1/responses/input_tokens", **described_body(CountRequest))
    async def input_tokens(request: Request) -> Response:
        """Count the tokens of a conversation."""
        return await api.count(request)

    @app.get("/v1/responses/{response_id}", responses=described_errors(401, 404))
    async def response(request: Request, response_id: str) -> Response:
        """Return an answer that is kept."""
        return api.get(response_id, server.owner_of(request))

    @app.delete("/v1/responses/{response_id}", responses=described_errors(401, 404))
    async def delete(request: Request, response_id: str) -> Response:
        """Forget an answer."""
        return api.delete(response_id, server.owner_of(request))


def _add_tokens(app: FastAPI, server: Server) -> None:
    @app.post("/tokenize", **described_body(TokenizeRequest))
    async def tokenize(request: Request) -> Response:
        """Return the tokens of a text or of a conversation."""
        return await answer_tokenize(server, request)

    @app.post("/detokenize", **described_body(DetokenizeRequest))
    async def detokenize(request: Request) -> Response:
        """Return the text of tokens."""
        return await answer_detokenize(server, request)


def _add_anthropic(app: FastAPI, server: Server) -> None:
    api = messages_api(server)

    @app.post("/v1/messages", **described_body(MessagesRequest))
    async def messages(request: Request) -> Response:
        """Answer a conversation of Anthropic's API."""
        return await server.answer(request, api.messages)

    @app.post("/v1/messages/count_tokens", **described_body(CountTokensRequest))
    async def count_tokens(request: Request) -> Response:
        """Count the tokens of a conversation."""
        return await api.count_tokens(request)


def _add_models(app: FastAPI, server: Server) -> None:
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


def _answered(request: Request, error: ApiError) -> Response:
    """Log an error and write it in the form of the API that was called."""
    log_refusal(request.scope, error)
    return JSONResponse(error.body_for(request.url.path), error.status, error.headers)


async def _tell(request: Request, error: Exception) -> Response:
    return _answered(request, error if isinstance(error, ApiError) else ApiError(400, str(error)))


async def _tell_http(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    message = f"{request.method} {request.url.path[:200]}: {error.detail}"
    answer = ApiError(
        error.status_code, message, code="not_found" if error.status_code == 404 else None,
        reason=str(error.detail),
    )  # fmt: skip
    response = _answered(request, answer)
    response.headers.update(error.headers or {})
    return response


async def _tell_unexpected(request: Request, error: Exception) -> Response:
    return _answered(request, server_error("the server failed; its log says why"))
