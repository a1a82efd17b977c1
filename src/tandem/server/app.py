"""The HTTP side: routes and errors. Independent of tensors and of how tokens are generated."""

from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager

from fastapi import FastAPI, Request
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import JSONResponse, PlainTextResponse, Response
from starlette.exceptions import HTTPException

from tandem.apis.anthropic.schemas import CountTokensRequest, MessagesRequest
from tandem.apis.errors import ApiError, server_error
from tandem.apis.ollama.schemas import OllamaChatRequest, OllamaGenerateRequest, ShowRequest
from tandem.apis.responses.schemas import CountRequest, ResponsesRequest
from tandem.apis.schemas import ChatRequest, CompletionRequest
from tandem.core.errors import TandemError
from tandem.server.event_stream import EVENTS, LINES, NAMED_EVENTS
from tandem.server.gate import HEALTHY, Gate
from tandem.server.ollama import add_ollama
from tandem.server.openapi import describe, described_body, described_errors
from tandem.server.page_files import add_page
from tandem.server.refusals import refusal
from tandem.server.service import Endpoint, Server
from tandem.server.tokens import DetokenizeRequest, TokenizeRequest

_METHODS = ("GET", "POST")
_HEADERS = ("authorization", "content-type", "x-api-key", "anthropic-version")
_COUNT = "Count the tokens of a conversation"


# Endpoints with a body: path, summary, handler.
_ENDPOINTS = (
    ("/v1/chat/completions", "Answer a conversation", Endpoint("chat", ChatRequest, EVENTS)),
    (
        "/v1/completions", "Go on with a text",
        Endpoint("completions", CompletionRequest, EVENTS),
    ),
    (
        "/v1/responses", "Answer a conversation of the Responses API",
        Endpoint("responses", ResponsesRequest, NAMED_EVENTS),
    ),
    (
        "/v1/messages", "Answer a conversation of Anthropic's API",
        Endpoint("messages", MessagesRequest, NAMED_EVENTS),
    ),
    (
        "/api/chat", "Answer a conversation of Ollama's API",
        Endpoint("ollama_chat", OllamaChatRequest, LINES),
    ),
    (
        "/api/generate", "Answer a prompt of Ollama's API",
        Endpoint("ollama_generate", OllamaGenerateRequest, LINES),
    ),
    ("/api/show", "Describe the model to Ollama's clients", Endpoint("ollama_show", ShowRequest)),
    ("/v1/responses/input_tokens", _COUNT, Endpoint("input_tokens", CountRequest)),
    ("/v1/messages/count_tokens", _COUNT, Endpoint("count_tokens", CountTokensRequest)),
    (
        "/tokenize", "Return the tokens of a text or of a conversation",
        Endpoint("tokenize", TokenizeRequest),
    ),
    ("/detokenize", "Return the text of tokens", Endpoint("detokenize", DetokenizeRequest)),
)  # fmt: skip
BODIES = [endpoint.body for _, _, endpoint in _ENDPOINTS]


def create_app(
    server: Server,
    *,
    api_keys: Sequence[str] = (),
    allowed_hosts: list[str] | None,
    lifespan: Callable[[FastAPI], AbstractAsyncContextManager[None]] | None = None,
) -> FastAPI:
    """Return the application. `allowed_hosts` are its accepted host names; None: any."""
    app = FastAPI(title="Tandem", docs_url=None, redoc_url=None, lifespan=lifespan)
    app.add_middleware(
        Gate, api_keys=api_keys, allowed_hosts=allowed_hosts, max_body_bytes=server.max_body_bytes
    )
    if (origin := server.options.allow_origin) is not None:
        app.add_middleware(
            CORSMiddleware, allow_origins=[origin], allow_methods=_METHODS, allow_headers=_HEADERS
        )
    app.add_exception_handler(TandemError, _tell)
    app.add_exception_handler(HTTPException, _tell_http)
    app.add_exception_handler(Exception, _tell_unexpected)
    _add_bodies(app, server)
    _add_kept_responses(app, server)
    _add_models(app, server)
    add_ollama(app, server)
    _add_rest(app, server)
    add_page(app)
    describe(app, BODIES)
    return app


def _add_bodies(app: FastAPI, server: Server) -> None:
    for path, about, endpoint in _ENDPOINTS:
        _add_body(app, path, about, endpoint, server)

    @app.post("/v1/embeddings", status_code=404, responses=described_errors(401, 413, 415))
    async def embeddings() -> Response:
        """Refuse: the served model writes text and gives no embeddings."""
        raise ApiError(
            404,
            "this server's model writes text and has no embeddings; use an embedding server",
            code="unsupported_endpoint",
        )


def _add_body(app: FastAPI, path: str, about: str, endpoint: Endpoint, server: Server) -> None:
    async def answer(request: Request) -> Response:
        return await server.answer(endpoint, request)

    described = described_body(endpoint.body)
    app.add_api_route(path, answer, methods=["POST"], summary=about, **described)


def _add_kept_responses(app: FastAPI, server: Server) -> None:
    @app.get("/v1/responses/{response_id}", responses=described_errors(401, 404))
    async def response(request: Request, response_id: str) -> Response:
        """Return a stored answer."""
        kept = server.kept_of(server.owner_of(request)).response(response_id)
        return Response(kept, media_type="application/json")

    @app.delete("/v1/responses/{response_id}", responses=described_errors(401, 404))
    async def delete(request: Request, response_id: str) -> Response:
        """Delete a stored answer."""
        server.kept_of(server.owner_of(request)).drop(response_id)
        return JSONResponse({"id": response_id, "object": "response", "deleted": True})


def _add_models(app: FastAPI, server: Server) -> None:
    @app.get("/v1/models")
    async def models() -> Response:
        """List the served model, under each of its names."""
        return JSONResponse(server.models())

    @app.get("/v1/models/{name:path}", responses=described_errors(401, 404))
    async def model(name: str) -> Response:
        """Describe the served model."""
        return JSONResponse(server.one_model(name))


def _add_rest(app: FastAPI, server: Server) -> None:
    @app.get("/health")
    async def health() -> Response:
        """Report that the server runs."""
        return Response(HEALTHY, media_type="application/json")

    @app.get("/ready", responses=described_errors(503))
    async def ready() -> Response:
        """Report whether the model is loaded and requests are accepted."""
        if server.engine.is_ready:
            return JSONResponse({"status": "ready"})
        return JSONResponse({"status": "not ready"}, 503, {"Retry-After": "2"})

    @app.get("/metrics", response_class=PlainTextResponse)
    async def metrics() -> Response:
        """Return the metrics for Prometheus."""
        return Response(server.metrics.text(), media_type="text/plain; version=0.0.4")

    @app.get("/live", include_in_schema=False)
    async def live() -> Response:
        return server.live()


async def _tell(request: Request, error: Exception) -> Response:
    return refusal(
        request.scope, error if isinstance(error, ApiError) else ApiError(400, str(error))
    )


async def _tell_http(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    message = f"{request.method} {request.url.path[:200]}: {error.detail}"
    answer = ApiError(
        error.status_code, message, code="not_found" if error.status_code == 404 else None,
        reason=str(error.detail),
    )  # fmt: skip
    response = refusal(request.scope, answer)
    response.headers.update(error.headers or {})
    return response


async def _tell_unexpected(request: Request, error: Exception) -> Response:
    return refusal(request.scope, server_error("the server failed; its log says why"))
