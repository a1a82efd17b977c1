"""Tests that memory grows with the longest request, not with the number of requests."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.server.running import RunningServer

CLIENTS, EACH = 4, 40
# An allocator keeps freed memory; 150 requests that leak 20 kB each would show.
SLACK_BYTES = 3e6
HOST, KV_CACHE = 'tandem_memory_bytes{kind="host"}', 'tandem_memory_bytes{kind="kv_cache"}'


def resident_bytes(process_id: int) -> int:
    status = Path(f"/proc/{process_id}/status").read_text(encoding="ascii")
    line = next(line for line in status.splitlines() if line.startswith("VmRSS:"))
    return int(line.split()[1]) * 1024


def ask_many(server: RunningServer, token_output: int) -> None:
    """Send requests of equal lengths from several clients, streamed and not."""

    def ask(client: int) -> None:
        for number in range(EACH):
            text = f"{token_output} {client} {number:2} and the same words again and again"
            form = {"type": "json_object"} if number % 5 == 0 else {"type": "text"}
            reply = server.chat(text, max_tokens=8, seed=number, temperature=0.9, logprobs=True,
                                response_format=form, stream=bool(number % 2))  # fmt: skip
            assert reply.status == 200, reply.body

    with ThreadPoolExecutor(CLIENTS) as clients:
        [*clients.map(ask, range(CLIENTS))]


def test_many_requests_take_no_more_memory_than_few(server: RunningServer) -> None:
    ask_many(server, 0)  # made once: records per batch size, room for these lengths
    host, front = server.metric(HOST), resident_bytes(server.process.pid)
    kv_cache = server.metric(KV_CACHE)
    ask_many(server, 1)
    assert server.metric(KV_CACHE) == kv_cache > 0
    assert server.metric(HOST) < host + SLACK_BYTES
    assert resident_bytes(server.process.pid) < front + SLACK_BYTES
