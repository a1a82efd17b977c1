"""Tries instructor: objects of a pydantic model, requested again until they are valid."""

# /// script
# dependencies = ["instructor"]
# ///

import sys
from typing import Annotated, Any

import instructor
import openai
from pydantic import BaseModel, ConfigDict, Field

from tests.clients.tasks import INVENT
from tests.clients.trying import Served, report


class Person(BaseModel):
    """A person. Further fields are forbidden, since OpenAI's `tools` would let a model add some."""

    model_config = ConfigDict(extra="forbid")
    name: Annotated[str, Field(max_length=20)]
    age: Annotated[int, Field(ge=0, le=120)]


class Anything(BaseModel):
    """An object with any fields."""

    model_config = ConfigDict(extra="allow")


def tools(served: Served) -> None:
    _ask(served, instructor.Mode.TOOLS)


def strict_tools(served: Served) -> None:
    _ask(served, instructor.Mode.TOOLS_STRICT)


def json_schema(served: Served) -> None:
    _ask(served, instructor.Mode.JSON_SCHEMA)


def json_object(served: Served) -> None:
    """Ask for any JSON object; only its form is checked, because a random model writes it."""
    client = _client(served, instructor.Mode.JSON)
    assert client.chat.completions.create(response_model=Anything, **_fields(served))


def partial_objects(served: Served) -> None:
    client = _client(served, instructor.Mode.TOOLS)
    seen = list(client.chat.completions.create_partial(response_model=Person, **_fields(served)))
    assert seen[-1].age is not None


def _ask(served: Served, mode: instructor.Mode) -> None:
    found = _client(served, mode).chat.completions.create(response_model=Person, **_fields(served))
    assert isinstance(found, Person)


def _fields(served: Served) -> dict[str, Any]:
    messages = [{"role": "user", "content": INVENT}]
    return {
        "model": served.name, "messages": messages, "max_tokens": 80, "temperature": 0.0,
        "max_retries": 1,
    }  # fmt: skip


def _client(served: Served, mode: instructor.Mode) -> Any:
    plain = openai.OpenAI(base_url=served.base_url, api_key="none", max_retries=0)
    return instructor.from_openai(plain, mode=mode)


if __name__ == "__main__":
    tries = [tools, strict_tools, json_schema, json_object, partial_objects]
    sys.exit(report("instructor", tries))
