"""Tests of the prompt process: a body's cost and failure affect its own request only."""

import asyncio
import dataclasses
import json
import os
import signal
import socket
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tandem.apis.errors import ApiError
from tandem.engine.helper import Limits, answer_in_fork, framed, is_whole, unframed
from tandem.server.options import ServerOptions
from tandem.server.preparing import LIMITS, Answered, Job, Needs, Prepared, Setup
from tandem.server.prompts import Prompts
from tests.server.running import RunningServer, wait_for_end
from tests.server.stubborn import COMPUTES, ENDS, HANGS, StubbornTokenizer
from tests.server.test_trimming import INFO as SHORT_INFO

INFO = dataclasses.replace(SHORT_INFO, context=None)
LONG = "x" * 100_000


def job(prompt: str, *, limits: Limits = LIMITS, room: int = 4, **fields: Any) -> Job:
    raw = json.dumps({"prompt": prompt, **fields}).encode()
    return Job("completions", raw, INFO, room, limits=limits)


def run(test: Callable[[Prompts], Awaitable[None]], **options: Any) -> None:
    async def whole() -> None:
        tokenizer: Any = StubbornTokenizer()
        prompts = Prompts(Setup(tokenizer, None, ServerOptions(), ("tiny",)), **options)
        try:
            await test(prompts)
        finally:
            prompts.process.close()

    asyncio.run(whole())


def tokens(answered: Answered) -> tuple[int, ...]:
    assert isinstance(answered.found, Prepared), answered
    return answered.found.requests[0].prompt


def children(process: int | None) -> list[int]:
    text = Path(f"/proc/{process}/task/{process}/children").read_text(encoding="ascii")
    return [*map(int, text.split())]


def test_bodies_become_requests() -> None:
    async def test(prompts: Prompts) -> None:
        assert tokens(await prompts.ask(job("abc"))) == (97, 98, 99)
        assert len(tokens(await prompts.ask(job(LONG)))) == len(LONG)
        needs = (await prompts.ask(job("abc", n=5))).found
        assert needs == Needs(5, None)
        refused = (await prompts.ask(job("abc", model="x" * 1000))).error
        assert refused is not None
        assert (refused.status, refused.param) == (400, "model")

    run(test)


@pytest.mark.parametrize("what", [HANGS, ENDS])
def test_a_body_that_the_process_does_not_survive_costs_no_other(what: str) -> None:
    async def test(prompts: Prompts) -> None:
        await prompts.ask(job("x"))
        first = prompts.process.pid
        pending = [asyncio.ensure_future(prompts.ask(job(text))) for text in (what, "abc", "de")]
        for task, number in zip(pending[1:], (3, 2), strict=True):
            assert len(tokens(await task)) == number
        with pytest.raises(ApiError, match="ended while it read this one") as raised:
            await pending[0]
        assert raised.value.status == 503
        assert prompts.process.pid != first

    run(test, most_seconds=5.0)


@pytest.mark.parametrize("what", [COMPUTES, ENDS])
def test_a_long_body_is_ended_alone(what: str) -> None:
    async def test(prompts: Prompts) -> None:
        await prompts.ask(job("x"))
        first = prompts.process.pid
        long = job(what + LONG, limits=LIMITS._replace(processor_seconds=0.2))
        pending = asyncio.ensure_future(prompts.ask(long))
        assert tokens(await prompts.ask(job("abc"))) == (97, 98, 99)
        with pytest.raises(ApiError, match="to be turned into a prompt; send less") as raised:
            await pending
        assert raised.value.status == 400
        assert prompts.process.pid == first

    run(test)


def test_a_long_body_is_not_read_on_once_its_client_has_left() -> None:
    async def test(prompts: Prompts) -> None:
        await prompts.ask(job("x"))
        pending = asyncio.ensure_future(prompts.ask(job(HANGS + LONG)))
        while not children(prompts.process.pid):
            await asyncio.sleep(0)
        pending.cancel()
        while children(prompts.process.pid):
            await asyncio.sleep(0)

    run(test)


def test_the_process_has_no_torch(server: RunningServer) -> None:
    assert server.chat(max_tokens=1).status == 200
    maps = Path(f"/proc/{server.helper('prompt_process')}/maps").read_text(encoding="utf-8")
    assert "libtorch" not in maps


def test_a_killed_prompt_process_costs_no_later_request(server: RunningServer) -> None:
    for _ in range(2):
        assert server.chat(max_tokens=2).status == 200
        killed = server.helper("prompt_process")
        os.kill(killed, signal.SIGKILL)
        assert server.chat(max_tokens=2).status == 200
        wait_for_end(killed)


def test_the_server_lives_while_prompts_are_not_read(server: RunningServer) -> None:
    assert server.chat(max_tokens=2).status == 200
    stopped = server.helper("prompt_process")
    os.kill(stopped, signal.SIGSTOP)
    try:
        with ThreadPoolExecutor(1) as clients:
            pending = clients.submit(server.chat, max_tokens=2)
            for path in ("/health", "/ready", "/v1/models", "/metrics"):
                assert server.ask("GET", path).status == 200
            assert not pending.done()
            os.kill(stopped, signal.SIGCONT)
            assert pending.result().status == 200
    finally:
        os.kill(stopped, signal.SIGCONT)


# ---- helpers -------------------------------------------------------------------------------------


def test_an_answer_that_breaks_off_is_none() -> None:
    whole = framed({"grammar": "x"})
    assert [length for length in range(len(whole) + 1) if is_whole(whole[:length])] == [len(whole)]
    assert unframed(whole) == {"grammar": "x"}


class _Large(NamedTuple):
    limits: Limits


def _large(job: _Large) -> bytes:
    return b"x" * (4 << 20)


def test_an_answer_that_is_read_late_is_whole() -> None:
    """The time limit covers work, not reading: a busy reader once got half of an answer."""
    wall_seconds = 2.0
    control, ours = socket.socketpair(), socket.socketpair()
    answer_in_fork(control[1], ours[1], _large)
    ours[1].close()
    with ours[0] as connection, control[0], control[1]:
        connection.sendall(framed(_Large(Limits(wall_seconds, wall_seconds, 1 << 30))))
        found = bytearray(connection.recv(1) + connection.recv(1))  # the answer is on its way
        time.sleep(wall_seconds + 0.1)  # the limit's, not another process's
        while piece := connection.recv(1 << 20):
            found += piece
    assert is_whole(found[1:])
    assert unframed(found[1:]) == _large(_Large(LIMITS))
