"""Ollama's routes that do not use the model: lists of models, and unsupported operations."""

from fastapi import FastAPI
from fastapi.responses import JSONResponse, Response

from tandem import __version__
from tandem.apis.errors import ApiError
from tandem.apis.ollama.models import FOLLOWED_VERSION, listed, running
from tandem.server.openapi import described_errors
from tandem.server.service import Server

_REFUSED = {
    "embed": "this server's model writes text and has no embeddings; use an embedding server",
    "embeddings": "this server's model writes text and has no embeddings; use an embedding server",
    **dict.fromkeys(
        ("pull", "push", "create", "copy", "delete"),
        "this server has the one model that it was started with; start another with tandem serve",
    ),
}


def add_ollama(app: FastAPI, server: Server) -> None:
    """Add the routes that do not use the model; `tandem.server.app` adds the others."""

    @app.get("/api/tags")
    async def tags() -> Response:
        """List the model for Ollama's clients."""
        engine = server.engine
        return JSONResponse(
            listed(server.names, engine.info, engine.statistics.memory_bytes, server.began)
        )

    @app.get("/api/ps")
    async def loaded() -> Response:
        """List the loaded model for Ollama's clients."""
        engine = server.engine
        return JSONResponse(
            running(server.model, engine.info, engine.statistics.memory_bytes, server.context)
        )

    @app.get("/api/version")
    async def version() -> Response:
        """Return the version of Ollama's API that Tandem follows, and Tandem's own."""
        return JSONResponse({"version": FOLLOWED_VERSION, "tandem": __version__})

    for name, why in _REFUSED.items():
        _add_refused(app, f"/api/{name}", why)


def _add_refused(app: FastAPI, path: str, why: str) -> None:
    async def refuse() -> Response:
        raise ApiError(404, why, code="unsupported_endpoint")

    app.add_api_route(
        path, refuse, methods=["DELETE" if path.endswith("delete") else "POST"], status_code=404,
        responses=described_errors(401, 413, 415), include_in_schema=False,
    )  # fmt: skip
