"""Tries litellm, one function for all providers."""

# /// script
# # mcp: litellm imports it where there are tools, and does not ask for it.
# dependencies = ["litellm", "mcp"]
# ///

import contextlib
import json
import sys
from typing import Any

import litellm

from tests.clients.tasks import MESSAGES, PERSON, TOO_LONG, WEATHER, check_person, check_weather
from tests.clients.trying import Served, report


def chat(served: Served) -> None:
    answer = _complete(served)
    assert answer.choices[0].message.content
    assert answer.usage.completion_tokens > 0


def stream_with_usage(served: Served) -> None:
    chunks = list(_complete(served, stream=True, stream_options={"include_usage": True}))
    assert any(chunk.choices and chunk.choices[0].delta.content for chunk in chunks)
    assert any(getattr(chunk, "usage", None) for chunk in chunks)


def required_tool(served: Served) -> None:
    answer = _complete(served, tools=[WEATHER], tool_choice="required", max_tokens=80)
    (call,) = answer.choices[0].message.tool_calls
    check_weather(call.function.name, json.loads(call.function.arguments))


def tool_result(served: Served) -> None:
    call = {"name": "get_weather", "arguments": '{"city": "Rome"}'}
    messages: list[Any] = [
        *MESSAGES,
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "c1", "type": "function", "function": call}],
        },
        {"role": "tool", "tool_call_id": "c1", "name": "get_weather", "content": "sunny"},
    ]
    answer = _complete(served, messages=messages, tools=[WEATHER])
    assert answer.choices[0].finish_reason in ("stop", "length", "tool_calls")


def json_schema(served: Served) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "p", "schema": PERSON, "strict": True}}
    answer = _complete(served, response_format=form, max_tokens=80)
    check_person(json.loads(answer.choices[0].message.content))


def cache_control(served: Served) -> None:
    part = {"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}
    messages = [{"role": "system", "content": [part], "cache_control": {"type": "ephemeral"}}]
    answer = _complete(served, messages=[*messages, *MESSAGES])
    assert answer.choices[0].message.content


def text_completion(served: Served) -> None:
    answer: Any = litellm.text_completion(
        model=f"text-completion-openai/{served.name}", prompt="Once upon a time",
        api_base=served.base_url, api_key="none", max_tokens=8, logprobs=2,
    )  # fmt: skip
    assert answer.choices[0].text
    assert answer.choices[0].logprobs


def vllm_provider(served: Served) -> None:
    answer: Any = litellm.completion(
        model=f"hosted_vllm/{served.name}", messages=MESSAGES, api_base=served.base_url,
        api_key="none", max_tokens=8, top_k=5, repetition_penalty=1.1, min_tokens=2,
    )  # fmt: skip
    assert answer.choices[0].message.content


def anthropic_provider(served: Served) -> None:
    answer: Any = litellm.completion(
        model=f"anthropic/{served.name}", messages=MESSAGES, api_base=served.address,
        api_key="none", max_tokens=80, tools=[WEATHER], tool_choice="required",
    )  # fmt: skip
    (call,) = answer.choices[0].message.tool_calls
    check_weather(call.function.name, json.loads(call.function.arguments))


def responses(served: Served) -> None:
    answer: Any = litellm.responses(
        model=f"openai/{served.name}", input="Why is the sky blue?", api_base=served.base_url,
        api_key="none", max_output_tokens=12,
    )  # fmt: skip
    assert answer.output[0].content[0].text


def too_long_a_prompt(served: Served) -> None:
    messages = [{"role": "user", "content": TOO_LONG}]
    with contextlib.suppress(litellm.exceptions.ContextWindowExceededError):
        _complete(served, messages=messages)
        raise AssertionError("it is answered")


def _complete(served: Served, **fields: Any) -> Any:
    arguments = {"model": f"openai/{served.name}", "messages": MESSAGES, "max_tokens": 12, **fields}
    return litellm.completion(api_base=served.base_url, api_key="none", num_retries=0, **arguments)


if __name__ == "__main__":
    tries = [
        chat, stream_with_usage, required_tool, tool_result, json_schema, cache_control,
        text_completion, vllm_provider, anthropic_provider, responses, too_long_a_prompt,
    ]  # fmt: skip
    sys.exit(report("litellm", tries))
