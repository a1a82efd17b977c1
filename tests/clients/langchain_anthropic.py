"""Tries langchain-anthropic, LangChain's chat model for Anthropic's API."""

# /// script
# dependencies = ["langchain-anthropic"]
# ///

import sys
from typing import Any

from langchain_anthropic import ChatAnthropic
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolMessage

from tests.clients.tasks import PERSON, QUESTION, WEATHER, check_person, check_weather
from tests.clients.trying import Served, report


def chat(served: Served) -> None:
    answer = _model(served).invoke(QUESTION)
    assert answer.content
    assert answer.usage_metadata["output_tokens"] > 0


def stream(served: Served) -> None:
    chunks = list(_model(served).stream(QUESTION))
    assert any(chunk.content for chunk in chunks)
    assert any(chunk.usage_metadata for chunk in chunks)


def cache_control(served: Served) -> None:
    text = {"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}
    messages: list[Any] = [SystemMessage([text]), HumanMessage(QUESTION)]
    _model(served).invoke(messages)
    usage = _model(served).invoke(messages).usage_metadata
    assert usage["input_token_details"]["cache_read"] > 0


def required_tool(served: Served) -> None:
    model = _model(served, max_tokens=80).bind_tools([WEATHER], tool_choice="any")
    (call,) = model.invoke(QUESTION).tool_calls
    check_weather(call["name"], call["args"])


def tool_result(served: Served) -> None:
    call = {"name": "get_weather", "args": {"city": "Rome"}, "id": "c1"}
    messages: list[Any] = [
        HumanMessage(QUESTION),
        AIMessage("", tool_calls=[call]),
        ToolMessage("sunny", tool_call_id="c1"),
    ]
    assert _model(served).bind_tools([WEATHER]).invoke(messages).usage_metadata


def structured_output(served: Served) -> None:
    schema = {"title": "Person", **PERSON}
    model = _model(served, max_tokens=80).with_structured_output(schema)
    check_person(model.invoke("Invent a person"))


def _model(served: Served, **fields: Any) -> Any:
    return ChatAnthropic(
        **{
            "model": served.name, "base_url": served.address, "api_key": "none", "max_tokens": 12,
            **fields,
        }
    )  # fmt: skip


if __name__ == "__main__":
    tries = (chat, stream, cache_control, required_tool, tool_result, structured_output)
    sys.exit(report("langchain-anthropic", tries))
