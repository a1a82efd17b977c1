"""Tests of failing steps in the engine process: the request fails, others continue."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.server.breakable import (
    BREAKING,
    KNOWN_BREAKING,
    KNOWN_WORDS,
    LOSING,
    LOST_WORDS,
    UNKNOWN_WORDS,
)
from tests.server.running import Reply, RunningServer, running_server

LONG = 30000


@pytest.fixture(scope="module")
def breakable(tiny_checkpoint: Path) -> Iterator[RunningServer]:
    with running_server(tiny_checkpoint, module="tests.server.breakable") as running:
        yield running


def write(server: RunningServer, text: str) -> Reply:
    """Generate a text that a grammar dictates, so that decode steps get its tokens."""
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"const": text}}}
    return server.chat(max_tokens=20, temperature=0, response_format=form)


def require_failure(reply: Reply, words: str) -> None:
    assert (reply.status, reply.error["type"]) == (500, "server_error")
    assert words in reply.error["message"]
    assert UNKNOWN_WORDS not in reply.body.decode()


def test_a_prompt_that_breaks_a_step_fails_alone(breakable: RunningServer) -> None:
    expected = breakable.chat("who else is here?", max_tokens=40, temperature=0)
    assert expected.status == 200
    restarts = breakable.metric("tandem_engine_restarts_total")
    with breakable.streaming("another", max_tokens=LONG, temperature=0) as stream:
        stream.readline()
        require_failure(breakable.chat(f"a {BREAKING}", max_tokens=4), "inside the server")
        require_failure(breakable.chat(f"a {KNOWN_BREAKING}", max_tokens=4), KNOWN_WORDS)
        company = breakable.chat("who else is here?", max_tokens=40, temperature=0)
        assert breakable.metric("tandem_requests_running") == 1, "the stream goes on"
    assert company.json["choices"] == expected.json["choices"]
    assert breakable.metric("tandem_engine_restarts_total") == restarts
    breakable.wait_for_log(UNKNOWN_WORDS)


def test_a_decode_step_that_breaks_fails_for_those_in_it(breakable: RunningServer) -> None:
    expected = breakable.chat("before", max_tokens=30, temperature=0)
    assert write(breakable, "a-b").status == 200, "the grammar lets whole texts through"
    with breakable.streaming("another", max_tokens=LONG, temperature=0) as stream:
        stream.readline()
        require_failure(write(breakable, f"a{BREAKING}b"), "inside the server")
        rest = stream.read().decode()
    assert '"server_error"' in rest
    assert "[DONE]" not in rest
    require_failure(write(breakable, f"a{KNOWN_BREAKING}b"), KNOWN_WORDS)
    breakable.wait_for("tandem_requests_running", 0)
    after = breakable.chat("before", max_tokens=30, temperature=0)
    assert after.json["choices"] == expected.json["choices"]


def test_a_gpu_that_is_lost_costs_its_requests_and_a_new_process(breakable: RunningServer) -> None:
    expected = breakable.chat("before", max_tokens=10, temperature=0)
    require_failure(breakable.chat(f"a {LOSING}", max_tokens=4), LOST_WORDS)
    breakable.wait_for("tandem_engine_restarts_total", 1)
    after = breakable.chat("before", max_tokens=10, temperature=0)
    assert after.json["choices"] == expected.json["choices"]


@pytest.mark.slow
def test_who_waits_comes_next_when_a_step_fails(tiny_checkpoint: Path, tmp_path: Path) -> None:
    with running_server(
        tiny_checkpoint, "--max-running", "1", cache=tmp_path, module="tests.server.breakable"
    ) as server, ThreadPoolExecutor(8) as clients:  # fmt: skip
        # They queue up faster than they are answered; each failure must let the next one in.
        breaking = [clients.submit(server.chat, f"{n} {BREAKING}", max_tokens=4) for n in range(7)]
        last = clients.submit(server.chat, max_tokens=4)
        for reply in breaking:
            require_failure(reply.result(), "inside the server")
        assert last.result().status == 200
