"""Tries langchain-openai, LangChain's chat model for OpenAI's API."""

# /// script
# dependencies = ["langchain-openai"]
# ///

import contextlib
import sys
from typing import Any

from langchain_core.exceptions import ContextOverflowError
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_openai import ChatOpenAI, OpenAI

from tests.clients.tasks import (
    INVENT,
    PERSON,
    QUESTION,
    TOO_LONG,
    WEATHER,
    check_person,
    check_weather,
)
from tests.clients.trying import Served, report


def chat(served: Served) -> None:
    answer = _model(served).invoke(QUESTION)
    assert answer.content
    assert answer.usage_metadata["output_tokens"] > 0


def stream(served: Served) -> None:
    chunks = list(_model(served, stream_usage=True).stream(QUESTION))
    assert any(chunk.content for chunk in chunks)
    assert any(chunk.usage_metadata for chunk in chunks)


def batch(served: Served) -> None:
    answers = _model(served).batch([QUESTION, "Why?", "How?"])
    assert all(answer.content for answer in answers)


def log_probabilities(served: Served) -> None:
    answer = _model(served, logprobs=True, top_logprobs=2).invoke(QUESTION)
    assert answer.response_metadata["logprobs"]["content"]


def required_tool(served: Served) -> None:
    model = _model(served, max_tokens=80).bind_tools([WEATHER], tool_choice="any")
    (call,) = model.invoke(QUESTION).tool_calls
    check_weather(call["name"], call["args"])


def tool_result(served: Served) -> None:
    call: Any = {"name": "get_weather", "args": {"city": "Rome"}, "id": "c1", "type": "tool_call"}
    turns = [
        HumanMessage(QUESTION),
        AIMessage("", tool_calls=[call]),
        ToolMessage("sunny", tool_call_id="c1"),
    ]
    answer = _model(served).bind_tools([WEATHER]).invoke(turns)
    assert answer.content or answer.tool_calls


def structured_output(served: Served) -> str:
    form = {"title": "Person", "description": "A person.", **PERSON}
    methods: list[Any] = ["json_schema", "function_calling", "json_mode"]
    for method in methods:
        model = _model(served, max_tokens=80).with_structured_output(form, method=method)
        found = model.invoke(INVENT)
        if method == "json_mode":  # any object, as OpenAI has it
            assert isinstance(found, dict)
        else:
            check_person(found)
    return ", ".join(methods)


def completion(served: Served) -> None:
    model = OpenAI(
        model=served.name, base_url=served.base_url, api_key="none", max_tokens=8, max_retries=0
    )
    assert model.invoke("Once upon a time")


def too_long_a_prompt(served: Served) -> None:
    with contextlib.suppress(ContextOverflowError):
        _model(served).invoke(TOO_LONG)
        raise AssertionError("it is answered")


def _model(served: Served, **fields: Any) -> Any:
    return ChatOpenAI(
        **{
            "model": served.name, "base_url": served.base_url, "api_key": "none",
            "max_tokens": 12, "temperature": 0, "max_retries": 0, **fields,
        }
    )  # fmt: skip


if __name__ == "__main__":
    tries = [
        chat, stream, batch, log_probabilities, required_tool, tool_result, structured_output,
        completion, too_long_a_prompt,
    ]  # fmt: skip
    sys.exit(report("langchain-openai", tries))
