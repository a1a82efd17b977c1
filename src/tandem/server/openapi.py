"""The OpenAPI description of bodies that routes read themselves."""

from typing import Any

from fastapi import FastAPI
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

_REF = "#/components/schemas/{model}"
_ERRORS = {
    400: "the request is not as described", 401: "the API key is missing or wrong",
    403: "called by another name than the server's own", 404: "there is no such thing",
    413: "the body is too large", 415: "the body is not JSON", 429: "the queue is full",
    503: "the model is not ready",
}  # fmt: skip


def described_body(kind: type[BaseModel]) -> dict[str, Any]:
    """Return a route's arguments that describe its body and its errors."""
    schema = {"$ref": _REF.format(model=kind.__name__)}
    body = {"required": True, "content": {"application/json": {"schema": schema}}}
    return {
        "openapi_extra": {"requestBody": body},
        "responses": {status: {"description": text} for status, text in _ERRORS.items()},
    }


def describe(app: FastAPI, kinds: list[type[BaseModel]]) -> None:
    """Add the schemas of bodies to an application's description."""
    plain = app.openapi

    def with_bodies() -> dict[str, Any]:
        description: dict[str, Any] = plain()
        _, found = models_json_schema([(kind, "validation") for kind in kinds], ref_template=_REF)
        schemas = description.setdefault("components", {}).setdefault("schemas", {})
        schemas.update(found["$defs"])
        return description

    app.openapi = with_bodies  # type: ignore[method-assign]
