"""Tests of slow grammars: their cost does not affect other requests."""

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tandem.apis.errors import ApiError
from tandem.core.errors import ConfigError
from tandem.dialects.grammar import json_grammar, regex_grammar
from tandem.engine.grammar_process import Tables, Writer
from tandem.server.grammars import Grammars
from tests.hf.tiny import byte_tokenizer
from tests.server.running import RunningServer, running_server, wait_for_end

SLOW = {"type": "integer", "multipleOf": 499979}
PROPERTIES = {"properties": {f"property{n}": {"type": "string"} for n in range(5000)}}
LONG_LIST = {"enum": [f"{n:06} and {'more ' * 8}" for n in range(60_000)]}
PATTERN = {"type": "string", "pattern": "(a|b)*a(a|b){18}"}
ARGUMENTS = {"type": "object", "properties": {"x": PATTERN}, "required": ["x"]}
WORDS = "processor time"
MESSAGES = [{"role": "user", "content": "x"}]
FORM = {"type": "json_schema", "json_schema": {"name": "x", "schema": SLOW}}
TOOL = {"name": "f", "parameters": {"type": "object", "properties": {"x": SLOW}}}
CHAT, TEXT, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"

REFUSED: dict[str, tuple[str, dict[str, Any]]] = {
    "json_schema": (TEXT, {"prompt": "x", "json_schema": SLOW}),
    "5,000 properties": (TEXT, {"prompt": "x", "json_schema": PROPERTIES}),
    "response_format": (CHAT, {"messages": MESSAGES, "response_format": FORM}),
    "tools": (CHAT, {"messages": MESSAGES, "tools": [{"type": "function", "function": TOOL}]}),
    "required": (
        CHAT,
        {"messages": MESSAGES, "tools": [{"type": "function", "function": TOOL}],
         "tool_choice": "required"},
    ),
    "responses": (RESPONSES, {"input": "x", "tools": [{"type": "function", **TOOL}]}),
    "text.format": (
        RESPONSES,
        {"input": "x", "text": {"format": {"type": "json_schema", "name": "x", "schema": SLOW}}},
    ),
    "messages": (
        "/v1/messages",
        {"messages": MESSAGES, "max_tokens": 4,
         "tools": [{"name": "f", "input_schema": TOOL["parameters"]}]},
    ),
    "grammar": (TEXT, {"prompt": "x", "grammar": 'start: %json {"type": "integer", '
                       '"multipleOf": 499979}'}),
}  # fmt: skip
MAY_PASS: dict[str, tuple[str, dict[str, Any]]] = {
    "3 MB": (TEXT, {"prompt": "x", "max_tokens": 1, "json_schema": LONG_LIST}),
    "60 tools": (
        CHAT,
        {"messages": MESSAGES, "max_tokens": 1, "tool_choice": "required",
         "tools": [{"type": "function", "function": {"name": f"f{n}", "parameters": ARGUMENTS}}
                   for n in range(60)]},
    ),
    "pattern": (TEXT, {"prompt": "x", "max_tokens": 1, "guided_regex": "(a|b)*a(a|b){18}"}),
    "choice": (
        TEXT, {"prompt": "x", "max_tokens": 1, "guided_choice": [f"{n} x" for n in range(5000)]}
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", [*REFUSED, *MAY_PASS])
def test_a_stream_goes_on_beside_a_slow_grammar(server: RunningServer, kind: str) -> None:
    path, body = {**REFUSED, **MAY_PASS}[kind]
    num_tokens = 0
    with server.streaming(max_tokens=30000, temperature=0, ignore_eos=True) as stream:
        stream.readline()
        with ThreadPoolExecutor(1) as clients:
            pending = clients.submit(server.ask, "POST", path, body)
            assert server.ask("GET", "/health").status == 200
            while not pending.done():
                num_tokens += stream.readline().startswith(b"data: {")
    reply = pending.result()
    if kind in REFUSED:
        assert (reply.status, WORDS in reply.json["error"]["message"]) == (400, True), reply.body
        # The limit is three tenths of a second of a core, at the lowest priority.
        assert num_tokens > 5
    else:
        assert reply.status in (200, 400), reply.body


def test_a_killed_grammar_process_costs_no_request(server: RunningServer) -> None:
    for number in (11, 12):
        assert server.complete(max_tokens=2, guided_regex=f"[0-9]{{{number}}}").ok
        killed = server.helper("grammar_process")
        path, slow = REFUSED["json_schema"]
        with ThreadPoolExecutor(1) as clients:
            pending = clients.submit(server.ask, "POST", path, slow)
            os.kill(killed, signal.SIGKILL)
        assert pending.result().status == 400
    assert server.helper("grammar_process") != killed


def test_a_grammar_that_grows_too_complex_ends_its_own_answer(server: RunningServer) -> None:
    rules = "\n".join(f'r{i}: "a" r{i * 7 % 1000}? | /[a-z]/ r{i * 3 % 1000}?' for i in range(1000))
    grammar = f'start: "x" s+\ns: {" | ".join(f"r{i}" for i in range(1000))}\n{rules}'
    with server.streaming(max_tokens=30000, temperature=0, ignore_eos=True) as stream:
        stream.readline()
        reply = server.complete(max_tokens=9, grammar=grammar)
        assert reply.status == 400
        assert "the answer ended here" in reply.error["message"]
        assert stream.readline() is not None
    server.wait_for("tandem_requests_running", 0)


def test_no_process_outlives_a_killed_server(tiny_checkpoint: Path, tmp_path: Path) -> None:
    with running_server(tiny_checkpoint, cache=tmp_path) as server:
        assert server.complete(max_tokens=1, guided_regex="[0-9]").ok
        children = [server.helper(name) for name in ("grammar_process", "prompt_process")]
        server.process.kill()
        server.process.wait()
        for child in children:
            wait_for_end(child)


def test_a_silent_engine_process_is_started_again(tiny_checkpoint: Path, tmp_path: Path) -> None:
    with running_server(tiny_checkpoint, "--engine-timeout", "4", cache=tmp_path) as server:
        stopped = server.engine_process
        with server.streaming(max_tokens=30000, ignore_eos=True) as stream:
            stream.readline()
            os.kill(stopped, signal.SIGSTOP)
            rest = stream.read().decode()
        assert "gave no sign of life for 4 seconds" in rest
        server.wait_until_ready()
        assert server.chat(max_tokens=2).status == 200
        assert not Path(f"/proc/{stopped}").exists()


# ---- without a server ----------------------------------------------------------------------------


def tables() -> Tables:
    return Tables.of(byte_tokenizer(), 128, (2,))


def run(test: Callable[[Grammars], Awaitable[None]], given: Callable[[], Tables] = tables) -> None:
    async def whole() -> None:
        grammars = Grammars(given)
        try:
            await test(grammars)
        finally:
            grammars.process.close()

    asyncio.run(whole())


def pattern(text: str) -> Writer:
    return Writer.of(partial(regex_grammar, text))


def slow(number: int) -> Writer:
    return Writer.of(partial(json_grammar, {**SLOW, "maximum": 10**9 + number}))


def test_what_has_passed_is_not_built_again() -> None:
    async def test(grammars: Grammars) -> None:
        first = await grammars.build(pattern("[0-9]+"))
        assert first == regex_grammar("[0-9]+")
        process = grammars.process.pid
        assert process is not None
        os.kill(process, signal.SIGKILL)
        assert await grammars.build(pattern("[0-9]+")) == first
        assert grammars.process.pid == process
        await grammars.build(pattern("[a-z]+"))
        assert grammars.process.pid != process

    run(test)


def test_an_honest_grammar_passes_slow_ones() -> None:
    """Sixteen slow ones need five seconds of a core; a normal one waits only briefly for each."""

    async def test(grammars: Grammars) -> None:
        tasks = [asyncio.ensure_future(grammars.build(slow(n))) for n in range(16)]
        honest = asyncio.ensure_future(grammars.build(pattern("[0-9]+")))
        assert await honest is not None
        assert sum(not task.done() for task in tasks) > 8
        for result in await asyncio.gather(*tasks, return_exceptions=True):
            assert isinstance(result, ConfigError)
            assert WORDS in str(result)

    run(test)


def test_the_line_of_grammars_is_bounded() -> None:
    async def test(grammars: Grammars) -> None:
        tasks = [asyncio.ensure_future(grammars.build(slow(n))) for n in range(100)]
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        error = done.pop().exception()
        assert isinstance(error, ApiError)
        assert error.status == 429
        for task in tasks:
            task.cancel()

    run(test)


def test_a_grammar_that_nobody_waits_for_is_not_built_on() -> None:
    async def test(grammars: Grammars) -> None:
        await grammars.build(pattern("x"))
        children = Path(f"/proc/{grammars.process.pid}/task/{grammars.process.pid}/children")
        tasks = [asyncio.ensure_future(grammars.build(slow(0))) for _ in range(2)]
        while not children.read_text(encoding="ascii"):
            await asyncio.sleep(0)
        tasks[0].cancel()
        await asyncio.sleep(0)
        while not children.read_text(encoding="ascii"):  # between two lanes, perhaps
            assert not tasks[1].done(), "the other one waits"
            await asyncio.sleep(0)
        tasks[1].cancel()
        while children.read_text(encoding="ascii"):
            await asyncio.sleep(0)
        with pytest.raises(asyncio.CancelledError):
            await tasks[1]

    run(test)


@pytest.mark.parametrize(
    ("given", "words"),
    [(Tables(None, 128, (2,)), "no fast tokenizer"), (Tables("", 128, ()), "end-of-sequence")],
)
def test_a_tokenizer_without_tables_is_told(given: Tables, words: str) -> None:
    async def test(grammars: Grammars) -> None:
        with pytest.raises(ConfigError, match=words):
            await grammars.build(pattern("x"))

    run(test, lambda: given)
