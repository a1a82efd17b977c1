"""The OpenAPI description of bodies that routes parse themselves."""

from typing import Any

from fastapi import FastAPI
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

_REF = "#/components/schemas/{model}"
_ERRORS = {
    400: "the request is not as described", 401: "the API key is missing or wrong",
    403: "called by another name than the server's own", 404: "there is no such thing",
    413: "the body is too large", 415: "the body is not JSON", 429: "the queue is full",
    499: "the client has left", 503: "the model is not ready", 504: "it took too long",
}  # fmt: skip


_ANY_JSON = {"application/json": {"schema": {"type": "object"}}}


def described_body(kind: type[BaseModel]) -> dict[str, Any]:
    """Return the arguments with which FastAPI describes a route's body, answers and errors."""
    schema = {"$ref": _REF.format(model=kind.__name__)}
    body = {"required": True, "content": {"application/json": {"schema": schema}}}
    kinds = ("text/event-stream", "application/x-ndjson")
    stream = {kind: {"schema": {"type": "string"}} for kind in kinds}
    answer = {"description": "the answer, whole or as a stream", "content": {**_ANY_JSON, **stream}}
    return {
        "openapi_extra": {"requestBody": body},
        "responses": {200: answer, **described_errors()},
    }


def described_errors(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """Return OpenAPI descriptions of errors, by status; without `statuses`, of all errors."""
    return {
        status: {"description": _ERRORS[status], "content": _ANY_JSON}
        for status in statuses or _ERRORS
    }


def describe(app: FastAPI, kinds: list[type[BaseModel]]) -> None:
    """Add the JSON schemas of these bodies to the application's OpenAPI description."""
    plain = app.openapi

    def with_bodies() -> dict[str, object]:
        description = plain()
        _, found = models_json_schema([(kind, "validation") for kind in kinds], ref_template=_REF)
        schemas = description.setdefault("components", {}).setdefault("schemas", {})
        schemas.update(found["$defs"])
        return description

    app.openapi = with_bodies  # type: ignore[method-assign]
