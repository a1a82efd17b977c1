"""Tests with requests from the API description; `python -m tests.server.abuse` sends many."""

from pathlib import Path
from typing import Any

import pytest

from tests.server.abuse import COMMAND, FLAGS, send
from tests.server.drawn import send_drawn
from tests.server.malformed import send_all
from tests.server.running import RunningServer, running_server


@pytest.mark.skipif(not COMMAND.exists(), reason="schemathesis is not installed")
def test_no_request_is_answered_otherwise_than_described(
    tiny_checkpoint: Path, tmp_path: Path
) -> None:
    with running_server(tiny_checkpoint, *FLAGS, cache=tmp_path) as server:
        done = send(server, phases="fuzzing", examples=8)
        assert done.returncode == 0, done.stdout
        number, problems = send_all(server)
        assert number > 250
        assert problems == []
        assert "Traceback" not in server.log
        assert_trims(server)


def test_no_drawn_request_is_the_servers_fault(server: RunningServer) -> None:
    assert send_drawn(server, 400) == []
    assert "Traceback" not in server.log


def assert_trims(server: RunningServer) -> None:
    """Assert that the server drops turns that do not fit, and reports it, streamed and not."""
    turn = [{"role": "user", "content": "x" * 30}, {"role": "assistant", "content": "y"}]
    body: dict[str, Any] = {
        "messages": [*turn * 4, {"role": "user", "content": "last"}], "max_tokens": 3,
    }  # fmt: skip
    whole = server.ask("POST", "/v1/chat/completions", body)
    assert whole.status == 200, whole.body
    number = int(whole.headers["x-tandem-dropped-turns"])
    assert whole.json["dropped_turns"] == number > 0
    streamed = server.ask("POST", "/v1/chat/completions", {**body, "stream": True})
    assert int(streamed.headers["x-tandem-dropped-turns"]) == number
    assert {event["dropped_turns"] for event in streamed.events} == {number}
