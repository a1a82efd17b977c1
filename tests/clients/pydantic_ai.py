"""Tries pydantic-ai: an agent with tools and typed results."""

# /// script
# dependencies = ["pydantic-ai-slim[openai]"]
# ///

import contextlib
import sys
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field
from pydantic_ai import Agent, NativeOutput, PromptedOutput, ToolOutput
from pydantic_ai.exceptions import UnexpectedModelBehavior
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

from tests.clients.tasks import INVENT, QUESTION
from tests.clients.trying import Served, report


class Person(BaseModel):
    """A person."""

    model_config = ConfigDict(extra="forbid")
    name: Annotated[str, Field(max_length=20)]
    age: Annotated[int, Field(ge=0, le=120)]


def text(served: Served) -> None:
    found = _agent(served).run_sync(QUESTION)
    assert found.output
    assert found.usage.output_tokens > 0


def conversation(served: Served) -> None:
    agent = _agent(served, system_prompt="Be brief.")
    first = agent.run_sync(QUESTION)
    assert agent.run_sync("And in Oslo?", message_history=first.new_messages()).output


def stream(served: Served) -> None:
    streamed = _agent(served).run_stream_sync(QUESTION)
    assert list(streamed.stream_text(delta=True))


def result_as_tool(served: Served) -> None:
    assert isinstance(_person(served, ToolOutput(Person)), Person)


def result_as_json_schema(served: Served) -> None:
    assert isinstance(_person(served, NativeOutput(Person)), Person)


def result_as_prompted(served: Served) -> None:
    assert isinstance(_person(served, PromptedOutput(Person)), Person)


def own_tool(served: Served) -> None:
    """Offer a tool; a call, a plain answer and running out of retries are all accepted."""
    agent = _agent(served, max_tokens=60)

    @agent.tool_plain
    def get_weather(city: str) -> str:
        """Return the weather in a city."""
        return f"sunny in {city}"

    with contextlib.suppress(UnexpectedModelBehavior):
        assert agent.run_sync(QUESTION).output


def _person(served: Served, output_type: Any) -> Any:
    agent = _agent(served, max_tokens=100, output_type=output_type)
    return agent.run_sync(INVENT).output


def _agent(served: Served, max_tokens: int = 12, **fields: Any) -> Any:
    provider = OpenAIProvider(base_url=served.base_url, api_key="none")
    model = OpenAIChatModel(served.name, provider=provider)
    settings = {"max_tokens": max_tokens, "temperature": 0.0}
    return Agent(model, model_settings=settings, **fields)


if __name__ == "__main__":
    tries = [
        text, conversation, stream, result_as_tool, result_as_json_schema, result_as_prompted,
        own_tool,
    ]  # fmt: skip
    sys.exit(report("pydantic-ai-slim", tries))
