"""Tests of fairness: priorities, deadlines, and keep-alive signs during a long prompt."""

import asyncio
from collections.abc import AsyncIterator, Callable, MutableMapping
from typing import Any

import pytest

from tandem.apis.errors import ApiError
from tandem.engine.messages import Cancel, EngineSettings, ModelInfo, Progressed, Ready, Submit
from tandem.generate.request import Request
from tandem.generate.sampling import SamplingOptions
from tandem.generate.token_output import TokenOutput
from tandem.server import engine_client, event_stream
from tandem.server.engine_client import EngineClient
from tandem.server.event_stream import EventStream
from tests.server.running import RunningServer

INFO = ModelInfo(
    model_type="tiny", vocabulary=128, end_ids=(), context=64, max_running=1, num_layers=1,
    num_experts=4, device="cpu", why_padded=None, why_no_images=None,
)  # fmt: skip


class FakeProcess:
    """Records what is sent to it."""

    sent: list[Any]
    on_message: Callable[[Any], None]
    pid = 1

    def __init__(self, load: Any, settings: Any, on_message: Any, on_end: Any) -> None:
        FakeProcess.sent, FakeProcess.on_message = [], staticmethod(on_message)

    def send(self, message: Any) -> None:
        self.sent.append(message)


def last_token(number: int) -> TokenOutput:
    return TokenOutput(number, token_id=5, finish_reason="stop", generated_tokens=1)


def request(priority: int = 0) -> Request:
    options = SamplingOptions(max_new_tokens=1)
    return Request(prompt=(5,), options=options, priority=priority)


async def started_client(max_waiting: int) -> EngineClient:
    settings = EngineSettings(max_running=1, part_tokens=16)
    client = EngineClient(lambda: None, settings, max_waiting=max_waiting)  # type: ignore[arg-type, return-value]
    starting = asyncio.ensure_future(client.start())
    await asyncio.sleep(0)
    FakeProcess.on_message(Ready(INFO))
    await starting
    return client


def test_every_prompt_of_a_request_counts_and_all_or_none_are_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(engine_client, "EngineProcess", FakeProcess)

    async def play() -> None:
        client = await started_client(max_waiting=9)
        client.submit(*[request()] * 4)
        for number, status in ((7, 429), (11, 400)):
            with pytest.raises(ApiError) as refused:
                client.submit(*[request()] * number)
            assert refused.value.status == status
            assert (client.num_running, client.num_waiting) == (1, 3)
        several = client.submit(*[request()] * 6)
        client.cancel(several.numbers)
        assert (client.num_running, client.num_waiting) == (1, 3)

    asyncio.run(play())


def test_thousands_that_leave_at_once_are_one_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """A search for each of them would take minutes."""
    monkeypatch.setattr(engine_client, "EngineProcess", FakeProcess)

    async def play() -> None:
        client = await started_client(max_waiting=100_000)
        client.submit(request())
        several = client.submit(*[request()] * 100_000)
        client.cancel(several.numbers)
        assert (client.num_running, client.num_waiting) == (1, 0)
        assert not any(isinstance(message, Cancel) for message in FakeProcess.sent)

    asyncio.run(play())


def test_lower_numbers_go_first_and_equals_in_their_order(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(engine_client, "EngineProcess", FakeProcess)
    waited: list[float] = []

    async def play() -> list[int]:
        client = await started_client(max_waiting=9)
        client.on_begin = waited.append
        for priority in (0, 1, 0, -1, 0):
            client.submit(request(priority))
        order: list[int] = []
        while submitted := [m for m in FakeProcess.sent if isinstance(m, Submit)][len(order) :]:
            (submit,) = submitted
            order.append(submit.request.request_id)
            FakeProcess.on_message(Progressed([last_token(order[-1])]))
        return order

    assert asyncio.run(play()) == [1, 4, 3, 5, 2]
    assert len(waited) == 5


def test_a_silent_stream_shows_that_it_lives(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_stream, "_SILENT_SECONDS", 0.001)

    async def play() -> list[bytes]:
        shown = asyncio.Event()
        sent: list[bytes] = []

        async def events() -> AsyncIterator[bytes]:
            yield b"data: 1\n\n"
            await shown.wait()
            yield b"data: 2\n\n"

        async def send(message: MutableMapping[str, Any]) -> None:
            sent.append(message.get("body", b""))
            if sent[-1].startswith(b":"):
                shown.set()

        async def receive() -> dict[str, Any]:
            await asyncio.Event().wait()
            raise AssertionError

        await EventStream(events())({"type": "http"}, receive, send)
        return sent

    sent = asyncio.run(play())
    assert [body for body in sent if body.startswith(b"data")] == [b"data: 1\n\n", b"data: 2\n\n"]
    assert any(body.startswith(b":") for body in sent)
    assert sent[-1] == b""


def test_a_deadline_is_kept_and_must_be_a_number(server: RunningServer) -> None:
    body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 30_000}
    path = "/v1/chat/completions"
    reply = server.ask("POST", path, body, {"X-Tandem-Deadline": "0.2"})
    assert reply.status == 504
    assert "longer than 0.2 seconds" in reply.error["message"]
    server.wait_for("tandem_requests_running", 0)
    for wrong in ("soon", "-1", "nan", "inf"):
        assert server.ask("POST", path, body, {"X-Tandem-Deadline": wrong}).status == 400


def test_gaps_and_waiting_are_measured(server: RunningServer) -> None:
    before = server.metric("tandem_token_gap_seconds_count")
    assert server.chat(max_tokens=5, temperature=0, priority=-3, service_tier="flex").status == 200
    assert server.metric("tandem_token_gap_seconds_count") >= before + 4
    assert server.metric("tandem_waiting_seconds_count") > 0
