"""Random malformed requests: valid bodies of every endpoint with one error in them."""

import copy
import json
import random
from collections.abc import Iterator
from typing import Any

from tests.server.running import RunningServer

_SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
_FUNCTION = {"name": "f", "description": "d", "parameters": _SCHEMA}
_TURNS = [
    {"role": "system", "content": "s"},
    {"role": "user", "content": [{"type": "text", "text": "hi", "cache_control": {}}]},
    {"role": "assistant", "content": None, "reasoning_content": "r", "tool_calls": [
        {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}]},
    {"role": "tool", "tool_call_id": "c", "content": "22"},
]  # fmt: skip
_SAMPLING = {
    "model": "tiny", "max_tokens": 2, "temperature": 0.5, "top_p": 0.9, "top_k": 5, "seed": 1,
    "stop": ["x"], "stream": False, "priority": 1,
}  # fmt: skip
_ITEMS = [
    {"role": "user", "content": [{"type": "input_text", "text": "hi"}]},
    {"type": "reasoning", "id": "r", "summary": [{"type": "summary_text", "text": "t"}]},
    {"type": "message", "role": "assistant", "id": "m",
     "content": [{"type": "output_text", "text": "x", "annotations": []}]},
    {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "c", "output": "22"},
]  # fmt: skip
_BLOCKS = [
    {"role": "user", "content": [{"type": "text", "text": "hi", "cache_control": {}}]},
    {"role": "assistant", "content": [
        {"type": "thinking", "thinking": "t", "signature": "s"},
        {"type": "tool_use", "id": "t", "name": "f", "input": {"n": 1}}]},
    {"role": "user", "content": [
        {"type": "tool_result", "tool_use_id": "t", "content": [{"type": "text", "text": "22"}]},
        {"type": "document", "source": {"type": "text", "data": "d"}}]},
]  # fmt: skip
_BODY: dict[str, Any] = {
    "model": "tiny", "input": _ITEMS, "instructions": "i", "store": False,
    "tools": [{"type": "function", **_FUNCTION}], "tool_choice": "auto",
    "text": {"format": {"type": "json_schema", "name": "x", "schema": _SCHEMA, "strict": True}},
    "reasoning": {"effort": "low"}, "truncation": "auto",
}  # fmt: skip
_MESSAGES: dict[str, Any] = {
    "model": "tiny", "messages": _BLOCKS, "system": [{"type": "text", "text": "s"}],
    "tools": [{"name": "f", "input_schema": _SCHEMA}], "thinking": {"type": "disabled"},
    "tool_choice": {"type": "auto"}, "output_config": {"effort": "low"},
}  # fmt: skip
_OLLAMA = [
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "", "thinking": "t", "tool_calls": [
        {"function": {"name": "f", "arguments": {"n": 1}}}]},
    {"role": "tool", "tool_name": "f", "content": "22"},
]  # fmt: skip
_OPTIONS = {"num_predict": 2, "temperature": 0.5, "seed": 1, "stop": ["x"], "num_ctx": 4096}
RIGHT: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {
        **_SAMPLING, "messages": _TURNS, "tools": [{"type": "function", "function": _FUNCTION}],
        "response_format": {"type": "json_schema", "json_schema": {"schema": _SCHEMA}},
        "logprobs": True, "top_logprobs": 1, "logit_bias": {"5": 1}, "stream_options": {},
        "chat_template_kwargs": {"x": 1}, "tool_choice": "auto",
    },
    "/v1/completions": {**_SAMPLING, "prompt": ["a", "b"], "logprobs": 1, "echo": True},
    "/v1/responses": {**_BODY, "max_output_tokens": 2, "metadata": {"a": "b"}},
    "/v1/responses/input_tokens": _BODY,
    "/v1/messages": {**_MESSAGES, "max_tokens": 2, "stop_sequences": ["x"], "metadata": {}},
    "/v1/messages/count_tokens": _MESSAGES,
    "/api/chat": {
        "model": "tiny:latest", "messages": _OLLAMA, "options": _OPTIONS, "format": _SCHEMA,
        "tools": [{"type": "function", "function": _FUNCTION}], "stream": False, "think": False,
        "keep_alive": "5m",
    },
    "/api/generate": {
        "prompt": "x", "options": _OPTIONS, "format": "json", "stream": False, "system": "s",
    },
    "/api/show": {"model": "tiny", "verbose": True},
    "/tokenize": {"messages": _TURNS, "return_token_strs": True},
    "/detokenize": {"tokens": [40, 41]},
}  # fmt: skip
_LENGTHS = ("max_tokens", "max_output_tokens", "num_predict")
_DEEP: Any = [0]
for _ in range(60):
    _DEEP = [_DEEP]
_VALUES: list[Any] = [
    None, True, False, 0, -1, 1.5, 1e308, 2**31, 2**70, -(2**63), "", "x", "\ud800", "\0",
    "x" * 3000,
    [], {}, [[]], [None], [{}], {"": ""}, {"type": "x"}, {"type": 5}, {"type": "text"}, _DEEP,
    ["a"] * 500, {"$ref": "#"}, {"type": "image", "source": {}}, "auto", "required", [1, "a", None],
    {"type": "image", "source": {"type": "base64", "data": "x"}}, {"type": "custom", "name": "x"},
    {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0KGgo="}},
    {"type": "input_image", "image_url": "https://x"},
    {"type": "namespace", "name": "x", "tools": [{"type": "custom", "name": "y", "format": {}}]},
]  # fmt: skip


def drawn_requests(count: int, seed: int = 1) -> Iterator[tuple[str, bytes]]:
    """Yield this many requests (path, body), the same ones for a seed."""
    chance = random.Random(seed)
    paths = list(RIGHT)
    for number in range(count):
        path = paths[number % len(paths)]
        body = copy.deepcopy(RIGHT[path])
        for _ in range(chance.choice((1, 1, 1, 2, 4))):
            _spoil(chance, body)
        data = json.dumps(body).encode()
        if chance.random() < 0.1:
            data = _torn(chance, data)
        yield path, data


def _spoil(chance: random.Random, body: dict[str, Any]) -> None:
    """Change one place in a body: another value, no value, an unknown field, a duplicate field."""
    places = list(_places(body))
    if not places:
        return
    owner, key = chance.choice(places)
    kind = chance.random()
    if kind < 0.6:
        owner[key] = copy.deepcopy(chance.choice(_VALUES))
    elif kind < 0.75:
        del owner[key]
    elif isinstance(owner, dict):
        names = [*RIGHT["/v1/chat/completions"], "input", "xyz", "type", "id"]
        name = chance.choice([name for name in names if name not in _LENGTHS])
        owner[name] = copy.deepcopy(chance.choice(_VALUES))
    else:
        owner.insert(0, copy.deepcopy(owner[key]))


def _places(node: Any) -> Iterator[tuple[Any, Any]]:
    for key in list(node) if isinstance(node, dict) else range(len(node)):
        if key in _LENGTHS:  # without them an answer fills the context
            continue
        if key != "options":  # in which a length is
            yield node, key
        if isinstance(node[key], dict | list):
            yield from _places(node[key])


def _torn(chance: random.Random, data: bytes) -> bytes:
    """Cut a body's bytes, or insert others."""
    place = chance.randrange(len(data))
    if chance.random() < 0.5:
        return data[:place]
    return data[:place] + bytes(chance.randrange(256) for _ in range(3)) + data[place:]


def send_drawn(server: RunningServer, count: int) -> list[str]:
    """Send random requests; return what was wrong with the answers."""
    problems = []
    for path, body in drawn_requests(count):
        reply = server.ask("POST", path, body)
        if reply.status >= 500 or (reply.status != 200 and not _is_error(path, reply.json)):
            problems.append(f"{reply.status} for {path} {body[:400]!r}: {reply.body[:200]!r}")
    if server.chat(max_tokens=2).status != 200:
        problems.append("the server does not answer any more")
    return problems


def _is_error(path: str, body: Any) -> bool:
    """Tell whether an answer is an error in its API's form."""
    error = body.get("error", {})
    if path.startswith("/v1/messages"):
        return body.get("type") == "error" and set(error) == {"type", "message"}
    if path.startswith("/api/"):
        return set(body) == {"error"} and isinstance(error, str)
    return set(error) == {"message", "type", "param", "code"}
