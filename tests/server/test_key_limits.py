"""Tests of one API key's limits: concurrent and waiting answers, tokens a minute; usage log."""

import asyncio
import json
import os
from pathlib import Path
from typing import Any

import pytest

from tandem.apis.errors import ApiError
from tandem.core.errors import ConfigError
from tandem.server.key_limits import KeyLimits, UseLog
from tandem.server.options import ServerOptions


def limits(**options: Any) -> KeyLimits:
    return KeyLimits(ServerOptions(**options), clock=lambda: 0.0)


async def entering(limits: KeyLimits, owner: bytes, number: int = 1) -> asyncio.Task[None]:
    task = asyncio.create_task(limits.enter(owner, number))
    await asyncio.sleep(0)
    return task


def test_a_keys_answers_wait_for_each_other_and_for_no_other_keys() -> None:
    async def tell() -> None:
        found = limits(key_running=2, key_waiting=3)
        first, second, third = [await entering(found, b"a") for _ in range(3)]
        assert [task.done() for task in (first, second, third)] == [True, True, False]
        assert (await entering(found, b"b", 2)).done()
        pair = await entering(found, b"a", 2)
        found.leave(b"a", 1, 10)
        await asyncio.sleep(0)
        assert (third.done(), pair.done()) == (True, False)
        late = await entering(found, b"a")  # it overtakes no request
        found.leave(b"a", 1, 10)
        await asyncio.sleep(0)
        assert (pair.done(), late.done()) == (False, False)
        with pytest.raises(ApiError, match="2 and 3 may") as refused:
            await found.enter(b"a", 1)
        assert refused.value.status == 429
        with pytest.raises(ApiError, match="asks for 3 answers at once") as refused:
            await found.enter(b"a", 3)
        assert refused.value.status == 400
        pair.cancel()  # its client has left
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert late.done()

    asyncio.run(tell())


def test_who_leaves_when_it_is_let_in_keeps_no_place() -> None:
    async def tell() -> None:
        found = limits(key_running=1)
        await found.enter(b"a", 1)
        waiting = await entering(found, b"a")
        found.leave(b"a", 1, 0)
        waiting.cancel()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert (await entering(found, b"a")).done()

    asyncio.run(tell())


def test_a_minutes_tokens_come_back() -> None:
    async def tell() -> None:
        now = [0.0]
        found = KeyLimits(ServerOptions(key_tokens_per_minute=60), clock=lambda: now[0])
        await found.enter(b"a", 1)
        found.leave(b"a", 1, 75)  # longer than what was left
        with pytest.raises(ApiError, match="used up its 60 tokens a minute") as refused:
            await found.enter(b"a", 1)
        assert (refused.value.status, refused.value.headers) == (429, {"Retry-After": "16"})
        await found.enter(b"b", 1)
        now[0] = 16.0
        await found.enter(b"a", 1)
        found.leave(b"a", 1, 1)
        now[0] = 1000.0  # no more than a minute's
        await found.enter(b"a", 1)
        found.leave(b"a", 1, 60)
        with pytest.raises(ApiError):
            await found.enter(b"a", 1)

    asyncio.run(tell())


def test_without_limits_all_enter() -> None:
    async def tell() -> None:
        found = limits()
        for _ in range(1000):
            await found.enter(b"", 50)

    asyncio.run(tell())


def test_options_that_do_not_fit_are_refused() -> None:
    for wrong in ({"key_running": 0}, {"key_tokens_per_minute": 0}, {"key_waiting": 3}):
        with pytest.raises(ConfigError, match=next(iter(wrong))):
            ServerOptions(**wrong)  # type: ignore[arg-type]


def test_a_log_that_cannot_be_written_is_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match=r"none/use\.jsonl cannot be written"):
        UseLog(str(tmp_path / "none" / "use.jsonl"))
    log = UseLog(str(tmp_path / "use.jsonl"))
    about = {"prompt_tokens": 3, "generated_tokens": 4, "seconds": 0.25}
    log.write(b"\x12\x34\x56\x78\x9a", "chat", "200", **about)  # type: ignore[arg-type]
    line = json.loads((tmp_path / "use.jsonl").read_text())
    assert line.pop("time").endswith("+00:00")
    assert line == {"key": "12345678", "endpoint": "chat", "status": 200} | about

    def fail(*arguments: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "write", fail)
    log.write(b"", "chat", "200", **about)  # type: ignore[arg-type]
    monkeypatch.undo()
    log.close()
    assert "No space left on device; 1 lines are lost" in caplog.text
