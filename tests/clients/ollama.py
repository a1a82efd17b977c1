"""Tries ollama: Ollama's own client, and the requests that editors send to Ollama."""

# /// script
# dependencies = ["ollama"]
# ///

import json
import sys
import urllib.request
from typing import Any

import ollama

from tests.clients.tasks import INVENT, MESSAGES, PERSON, QUESTION, WEATHER, check_person
from tests.clients.trying import Served, report

_FEW: Any = {"num_predict": 12, "temperature": 0}


def chat(served: Served) -> None:
    client = ollama.Client(served.address)
    whole = client.chat(served.name, MESSAGES, options=_FEW)
    parts = list(client.chat(served.name, MESSAGES, options=_FEW, stream=True))
    text = "".join(part.message.content or "" for part in parts)
    assert text == whole.message.content, text
    assert parts[-1].done
    assert whole.eval_count, whole


def prompt(served: Served) -> None:
    client = ollama.Client(served.address)
    assert client.generate(served.name, QUESTION, system="Be brief.", options=_FEW).response
    raw = client.generate(served.name, "Once upon a time", raw=True, options=_FEW, stream=True)
    assert "".join(part.response or "" for part in raw)


def tools(served: Served) -> None:
    client = ollama.Client(served.address)

    def get_weather(city: str) -> str:
        """The weather in a city."""
        return "sunny"

    assert client.chat(served.name, MESSAGES, tools=[get_weather, WEATHER], options=_FEW).done


def tool_result(served: Served) -> None:
    call = {"function": {"name": "get_weather", "arguments": {"city": "Rome"}}}
    messages = [
        *MESSAGES,
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "sunny", "tool_name": "get_weather"},
    ]
    client = ollama.Client(served.address)
    answer = client.chat(served.name, messages, tools=[WEATHER], options=_FEW)
    assert answer.message.content


def schema(served: Served) -> None:
    client = ollama.Client(served.address)
    options = {"num_predict": 80, "temperature": 0}
    found = client.generate(served.name, INVENT, format=PERSON, options=options).response
    check_person(json.loads(found))


def json_object(served: Served) -> None:
    client = ollama.Client(served.address)
    options = {"num_predict": 200, "temperature": 0}
    answer = client.generate(served.name, INVENT, format="json", options=options)
    assert answer.response.startswith("{")


def log_probabilities(served: Served) -> None:
    client = ollama.Client(served.address)
    answer = client.chat(served.name, MESSAGES, logprobs=True, top_logprobs=2, options=_FEW)
    assert answer.logprobs
    assert len(answer.logprobs[0].top_logprobs or ()) == 2


def models(served: Served) -> None:
    client = ollama.Client(served.address)
    assert [one.model for one in client.list().models] == [served.name]
    assert [one.model for one in client.ps().models] == [served.name]
    shown = client.show(served.name)
    assert "completion" in (shown.capabilities or ())
    assert any(key.endswith(".context_length") for key in shown.modelinfo or ())


def errors(served: Served) -> None:
    client = ollama.Client(served.address)
    for fails in (
        lambda: client.generate(served.name, QUESTION, options={"mirostat": 2}),
        lambda: client.embed(served.name, QUESTION),
        lambda: list(client.pull("other", stream=True)),
    ):
        assert not _error_of(fails).startswith("{"), "it is no sentence"


def _error_of(fails: Any) -> str:
    try:
        fails()
    except ollama.ResponseError as error:
        return str(error.error)
    raise AssertionError("it was answered")


def zed(served: Served) -> None:
    """Send requests as crates/ollama of zed-industries/zed does."""
    _send(served, "/api/tags")
    assert _send(served, "/api/show", {"model": served.name})["capabilities"]
    body = {
        "model": served.name, "messages": MESSAGES, "stream": True, "keep_alive": -1,
        "options": {"num_ctx": 4096, "num_predict": 12, "stop": [], "temperature": 1.0,
                    "top_p": None},
        "think": None, "tools": [],
    }  # fmt: skip
    assert _lines(served, "/api/chat", body)[-1]["done"]


def continue_dev(served: Served) -> None:
    """Send requests as core/llm/llms/Ollama.ts of continuedev/continue does."""
    _send(served, "/api/show", {"name": served.name})
    options = {"temperature": 0.1, "num_predict": 12, "num_ctx": 8192, "stop": ["\n\n"]}
    body = {"model": served.name, "options": options, "keep_alive": 1800}
    assert _lines(served, "/api/chat", {**body, "messages": MESSAGES, "stream": True})[-1]["done"]
    raw = {**body, "prompt": "def add(a, b):", "raw": True}
    assert _lines(served, "/api/generate", raw)[-1]["done"]


def copilot_chat(served: Served) -> None:
    """Send requests as the extension's ollamaProvider.ts does; it chats through OpenAI's API."""
    version = _send(served, "/api/version")["version"]
    assert tuple(map(int, version.split("."))) >= (0, 6, 4)
    (model,) = _send(served, "/api/tags")["models"]
    information = _send(served, "/api/show", {"model": model["model"]})
    kind = information["model_info"]["general.architecture"]
    assert information["model_info"][f"{kind}.context_length"]
    assert "tools" in information["capabilities"]


def curl_without_content_type(served: Served) -> None:
    body = {"model": served.name, "prompt": QUESTION, "options": _FEW, "stream": False}
    assert _send(served, "/api/generate", body)["response"]


def _send(served: Served, path: str, body: Any = None) -> Any:
    """Return the answer to a request; urllib sends the same Content-Type for a body as curl."""
    data = None if body is None else json.dumps(body).encode()
    with urllib.request.urlopen(served.address + path, data) as answer:
        return json.loads(answer.read())


def _lines(served: Served, path: str, body: Any) -> list[Any]:
    data = json.dumps(body).encode()
    with urllib.request.urlopen(served.address + path, data) as answer:
        return [json.loads(line) for line in answer]


if __name__ == "__main__":
    tries = [chat, prompt, tools, tool_result, schema, json_object, log_probabilities, models,
             errors, zed, continue_dev, copilot_chat, curl_without_content_type]  # fmt: skip
    sys.exit(report("ollama", tries))
