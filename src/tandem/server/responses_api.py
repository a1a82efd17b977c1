"""Responses that are kept, by their ids: OpenAI's `GET` and `DELETE /v1/responses/ID`."""

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response

from tandem.server.openapi import described_errors
from tandem.server.service import Server


def add_kept_responses(app: FastAPI, server: Server) -> None:
    """Add their routes."""

    @app.get("/v1/responses/{response_id}", responses=described_errors(401, 404))
    async def response(request: Request, response_id: str) -> Response:
        """Return an answer that is kept."""
        kept = server.kept_of(server.owner_of(request)).response(response_id)
        return Response(kept, media_type="application/json")

    @app.delete("/v1/responses/{response_id}", responses=described_errors(401, 404))
    async def delete(request: Request, response_id: str) -> Response:
        """Forget an answer."""
        server.kept_of(server.owner_of(request)).drop(response_id)
        return JSONResponse({"id": response_id, "object": "response", "deleted": True})
