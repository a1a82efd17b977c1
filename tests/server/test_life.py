"""Tests of a server's life: clients leave, queues fill, processes die, servers end."""

import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tandem.cli.main import main
from tandem.core.errors import ConfigError
from tandem.engine.messages import EngineSettings
from tandem.server.options import ServerOptions
from tandem.server.page_files import PAGE_FILES
from tandem.server.serving import Source, serve
from tests.server.checkpoint import never_called
from tests.server.running import RunningServer, running_server, wait_for_end

LONG: dict[str, Any] = {"max_tokens": 30000, "temperature": 0}
GUARDED = (
    ("GET", "/v1/models"),
    ("GET", "/metrics"),
    ("GET", "/live"),
    ("GET", "/openapi.json"),
    ("POST", "/v1/chat/completions"),
)
KEY = "a-long-random-string"
ORIGIN = "https://mine.example"


@pytest.fixture(scope="module")
def small(
    tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RunningServer]:
    """A server with one slot and one waiting place, open to other machines, so with a key."""
    flags = ["--host", "0.0.0.0", "--max-running", "1", "--max-waiting", "1"]
    flags += ["--allow-origin", ORIGIN]
    cache = tmp_path_factory.mktemp("cache")
    with running_server(
        tiny_checkpoint, *flags, "--shutdown-timeout", "0.5", cache=cache, TANDEM_API_KEY=KEY
    ) as running:
        yield running


def settled(server: RunningServer, name: str) -> float:
    """Return a metric of the engine process once it is stable; it reports twice a second."""
    value = server.metric(name)
    while True:
        time.sleep(0.8)
        before, value = value, server.metric(name)
        if value == before:
            return value


def test_a_client_that_leaves_frees_its_place(server: RunningServer) -> None:
    before = settled(server, "tandem_generated_tokens_total")
    with server.streaming(**LONG) as response:
        assert response.readline().startswith(b"data: ")
        server.wait_for("tandem_requests_running", 1)
        while server.metric("tandem_generated_tokens_total") == before:
            assert response.readline()  # the answer continues: its tokens will be reported
    server.wait_for("tandem_requests_running", 0)
    # The engine process stops too; test_cancelling.py counts its steps.
    generated = settled(server, "tandem_generated_tokens_total") - before
    assert 0 < generated < LONG["max_tokens"]


def test_a_client_that_leaves_without_streaming_frees_its_place(server: RunningServer) -> None:
    connection = server.connect()
    body = b'{"messages": [{"role": "user", "content": "x"}], "max_tokens": 30000}'
    headers = {"Content-Type": "application/json"}
    connection.request("POST", "/v1/chat/completions", body, headers)
    server.wait_for("tandem_requests_running", 1)
    connection.close()
    server.wait_for("tandem_requests_running", 0)


def test_without_the_key_nothing_is_told(small: RunningServer) -> None:
    for value in ("", "Bearer wrong", "Bearer ", f"Basic {KEY}", f"Bearer {KEY}x"):
        for method, path in GUARDED:
            reply = small.ask(method, path, headers={"Authorization": value})
            assert (reply.status, reply.error["code"]) == (401, "invalid_api_key"), path
    for path in ("/health", *PAGE_FILES):
        assert small.ask("GET", path, headers={"Authorization": ""}).status == 200, path
    assert small.ask("GET", "/v1/models").status == 200


def test_the_origin_that_is_let_in_is_told_so(small: RunningServer) -> None:
    headers = {"Origin": ORIGIN, "Access-Control-Request-Method": "POST", "Authorization": ""}
    before = small.ask("OPTIONS", "/v1/chat/completions", headers=headers)
    assert before.status == 200
    for origin, told in ((ORIGIN, ORIGIN), ("https://evil.example", None)):
        reply = small.ask("GET", "/v1/models", headers={"Origin": origin})
        assert reply.headers.get("access-control-allow-origin") == told
    refused = small.ask("GET", "/v1/models", headers={"Origin": ORIGIN, "Authorization": ""})
    for reply in (before, refused):
        assert reply.headers["access-control-allow-origin"] == ORIGIN


def test_a_full_queue_says_when_to_come_again(small: RunningServer) -> None:
    with ThreadPoolExecutor(1) as clients, small.streaming(**LONG) as first:
        first.readline()
        waiting = clients.submit(small.chat, max_tokens=2)
        small.wait_for("tandem_requests_waiting", 1)
        refused = small.chat(max_tokens=2)
        assert (refused.status, refused.error["code"]) == (429, "queue_full")
        assert int(refused.headers["retry-after"]) >= 1
    assert waiting.result().status == 200, "who waited comes next"


def test_prompts_and_choices_count_to_the_queue_before_they_are_read(small: RunningServer) -> None:
    refused = small.complete(["x" * 1000] * 1024, n=16, max_tokens=2)
    assert (refused.status, "16384 answers" in refused.error["message"]) == (400, True)
    assert small.chat(n=3).status == 400
    assert small.chat(n=2, max_tokens=2).status == 200


def test_a_killed_decode_process_takes_with_it_only_what_ran(small: RunningServer) -> None:
    with ThreadPoolExecutor(1) as clients, small.streaming(**LONG) as running:
        running.readline()
        waiting = clients.submit(small.chat, max_tokens=3, temperature=0)
        small.wait_for("tandem_requests_waiting", 1)
        os.kill(small.engine_process, signal.SIGKILL)
        rest = running.read().decode()
        assert "ended while this request was running" in rest
        assert "[DONE]" not in rest
    assert waiting.result().status == 200
    small.wait_until_ready()
    assert small.metric("tandem_engine_restarts_total") == 1


@pytest.mark.slow
def test_a_model_that_is_gone_when_the_process_starts_anew_is_told(
    tiny_checkpoint: Path, tmp_path: Path
) -> None:
    checkpoint = shutil.copytree(tiny_checkpoint, tmp_path / "model")
    with running_server(checkpoint, cache=tmp_path / "cache") as server:
        child = server.engine_process
        (checkpoint / "config.json").unlink()
        os.kill(child, signal.SIGKILL)
        wait_for_end(child)
        replies = [server.chat(max_tokens=3) for _ in range(2)]  # one that waits, one that is late
        assert [reply.status for reply in replies] == [503, 503]
        assert "cannot be loaded" in replies[1].error["message"]
        assert server.ask("GET", "/ready").status == 503
        server.wait_for_log("config.json")


def test_a_request_that_takes_too_long_is_given_up(tiny_checkpoint: Path, tmp_path: Path) -> None:
    """A server that shuts down tells running requests so after their grace period."""
    with running_server(
        tiny_checkpoint, "--request-timeout", "3", "--shutdown-timeout", "0.1",
        "--max-running", "1", cache=tmp_path,
    ) as server:  # fmt: skip
        # 240,000 steps one after another would take over three seconds on any machine.
        reply = server.complete([f"number {i}" for i in range(8)], **LONG)
        assert reply.status == 504
        assert "longer than 3 seconds" in reply.error["message"]
        server.wait_for("tandem_requests_running", 0)
        child = server.engine_process
        with server.streaming(**LONG) as response:
            response.readline()
            os.kill(server.process.pid, signal.SIGTERM)
            rest = response.read().decode()
        assert "shutting down" in rest
        assert "[DONE]" not in rest
        server.end()
        wait_for_end(child)
        assert "Traceback" not in server.log


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("demo", "--host", "0.0.0.0"), "set TANDEM_API_KEY"),
        (("demo", "--max-running", "0"), "max_running"),
        (("no/such/folder",), "no/such/folder"),
    ],
)
def test_a_server_that_cannot_be_says_why(
    arguments: tuple[str, ...],
    words: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("TANDEM_API_KEY", raising=False)
    monkeypatch.setattr(logging, "basicConfig", lambda **_: None)  # the log belongs to the tests
    assert main(["serve", *arguments, "--port", "0"]) == 2
    errors = capsys.readouterr().err
    assert words in errors
    assert "Traceback" not in errors


def test_ctrl_c_while_the_model_is_loaded_ends_both_processes(tiny_checkpoint: Path) -> None:
    words = [sys.executable, "-m", "tandem", "serve", str(tiny_checkpoint), "--port", "0"]
    process = subprocess.Popen(words, stderr=subprocess.PIPE, text=True, start_new_session=True)
    assert process.stderr is not None
    log = ""
    while "startup complete" not in log:  # the engine process has only just been started
        line = process.stderr.readline()
        assert line, log
        log += line
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does
    log += process.communicate(timeout=60)[1]
    assert process.returncode == 130, log
    assert "Traceback" not in log


def test_a_taken_port_is_told_at_once(server: RunningServer) -> None:
    """The error comes before anything is loaded."""
    source = Source(name="x", load_model=never_called, load_tokenizer=never_called)
    settings = EngineSettings(max_running=1, part_tokens=16)
    with pytest.raises(ConfigError, match="choose another --port"):
        serve(source, ServerOptions(port=server.port), settings, on_ready=print)


def test_each_part_of_an_answer_is_sent_at_once(server: RunningServer) -> None:
    """Otherwise the second part would wait 40 ms for the first one's acknowledgement."""
    question = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
    seconds = []
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        for _ in range(100):
            begin = time.monotonic()
            connection.sendall(question)
            reply = connection.recv(1 << 16)
            while not reply.endswith(b"}"):
                reply += connection.recv(1 << 16)
            seconds.append(time.monotonic() - begin)
    assert sorted(seconds)[40] < 0.03  # a busy machine may delay others
