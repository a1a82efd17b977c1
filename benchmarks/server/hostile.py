"""Hostile clients beside one stream: make try-hostile, python -m benchmarks.server.hostile

Starts a server with a key on 127.0.0.1, and clients of all kinds of `hostile_requests`. Another
process streams answers and requests /health meanwhile. Prints the stream's longest gap between two
tokens, /health's longest time, statuses, and the server's memory after a warm-up and at the end.
Exits with 1 if a bound is exceeded: a gap of 1 s, a 5xx answer, 2 % more memory.
"""

import argparse
import asyncio
import itertools
import json
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

from benchmarks.server.hostile_requests import KINDS, SCHEMA_KINDS, Target, attack
from tests.server.running import running_server

KEY = "the owner's key"
_GAP_SECONDS, _HEALTH_SECONDS, _GROWTH = 1.0, 0.1, 1.02
# Share of the time after which memory is compared; until then caches and the KV cache grow.
_WARM_UP = 0.3
_TOKENS = 400
_GAPS = 8  # the longest ones, with their times
# Hostile clients would be on other machines: here they yield to the server.
_NICENESS = 5


@dataclass(frozen=True, slots=True)
class Observed:
    """The observations of the normal client."""

    gaps: dict[float, float]
    """Seconds between two tokens of a stream, by the time of the second one."""
    first: list[float]
    """Seconds to the first token of each stream."""
    health: list[float]
    refused: int
    failed: list[int]


async def _listen(port: int, seconds: float) -> Observed:
    observed = Observed({}, [], [], 0, [])
    begin = time.monotonic()
    end = begin + seconds
    asking = asyncio.ensure_future(_ask_health(port, observed.health))
    refused = 0
    body = {"messages": [{"role": "user", "content": "Tell a story."}], "stream": True,
            "max_tokens": _TOKENS, "ignore_eos": True}  # fmt: skip
    while time.monotonic() < end:
        status = await _stream(port, json.dumps(body).encode(), observed, end)
        if status == 429:
            refused += 1
            await asyncio.sleep(0.1)
        elif status >= 500 or status == 0:
            observed.failed.append(status)
    asking.cancel()
    gaps = {now - begin: gap for now, gap in observed.gaps.items()}
    return Observed(gaps, observed.first, observed.health, refused, observed.failed)


async def _stream(port: int, body: bytes, observed: Observed, end: float) -> int:
    began = time.monotonic()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(Target(port, KEY).head("/v1/chat/completions", len(body)) + body)
        words = (await reader.readline()).split()
        status = int(words[1]) if len(words) > 1 else 0
        latest: float | None = None
        while status == 200 and (line := await reader.readline()) and time.monotonic() < end:
            # The first one has the role and no text: it comes before the request has a slot.
            if b'"content":' in line and b'"content":""' not in line:
                now = time.monotonic()
                if latest is None:
                    observed.first.append(now - began)
                else:
                    observed.gaps[now] = now - latest
                latest = now
            elif line.startswith(b"data: [DONE]"):
                break
        return status
    except ConnectionError:
        return 0
    finally:
        writer.transport.abort()


async def _ask_health(port: int, found: list[float]) -> None:
    while True:
        began = time.monotonic()
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        if b"200" in await reader.readline():
            found.append(time.monotonic() - began)
        writer.transport.abort()
        await asyncio.sleep(0.05)


def _be_honest(port: int, seconds: float, pipe: Connection) -> None:
    pipe.send(asyncio.run(_listen(port, seconds)))


def _resident_bytes(process_id: int) -> int:
    status = Path(f"/proc/{process_id}/status").read_text(encoding="ascii")
    line = next(line for line in status.splitlines() if line.startswith("VmRSS:"))
    return int(line.split()[1]) * 1024


def _server_bytes(process_id: int) -> int:
    """Return the resident bytes of a server's processes, without forks for one body or grammar."""
    num_bytes = _resident_bytes(process_id)
    for children in Path(f"/proc/{process_id}/task").glob("*/children"):  # each thread's own
        for child in children.read_text(encoding="ascii").split():
            num_bytes += _resident_bytes(int(child))
    return num_bytes


async def _attack_all(target: Target, process_id: int, options: argparse.Namespace) -> list[int]:
    kinds = {**KINDS, **SCHEMA_KINDS}
    kinds = {name: kinds[name] for name in options.kinds or kinds}
    chosen = itertools.islice(itertools.cycle(kinds.items()), options.clients)
    clients = [asyncio.ensure_future(attack(target, kind, send)) for kind, send in chosen]
    end, memory = time.monotonic() + options.minutes * 60, []
    while time.monotonic() < end:
        await asyncio.sleep(1)
        memory.append(_server_bytes(process_id))
    for client in clients:
        client.cancel()
    await asyncio.gather(*clients, return_exceptions=True)
    return memory


def _judge(observed: Observed, target: Target, memory: list[int]) -> list[str]:
    """Print the observations; return the bounds that were exceeded."""
    for what, count in sorted(target.statuses.items()):
        print(f"{count:7} {what}")
    early = memory[int(len(memory) * _WARM_UP) :]
    tenth = max(1, len(early) // 5)
    before, after = statistics.median(early[:tenth]), statistics.median(early[-tenth:])
    longest = sorted(observed.gaps.items(), key=lambda gap: -gap[1])[:_GAPS]
    gap, health = max(observed.gaps.values(), default=0.0), max(observed.health, default=0.0)
    failed = sum(n for what, n in target.statuses.items() if what.split(": ")[1][0] == "5")
    found = {
        "longest_gap_seconds": round(gap, 3),
        "median_gap_seconds": round(statistics.median(observed.gaps.values() or [0.0]), 4),
        "longest_gaps": [[round(at, 1), round(gap, 3)] for at, gap in longest],
        "tokens": len(observed.gaps),
        "longest_first_seconds": round(max(observed.first, default=0.0), 2),
        "refused_streams": observed.refused,
        "longest_health_seconds": round(health, 3),
        "failed": failed + len(observed.failed),
        "memory_before_mib": round(before / 2**20, 1),
        "memory_after_mib": round(after / 2**20, 1),
    }
    problems = [f"a gap of {gap:.2f} s"] if gap >= _GAP_SECONDS or not observed.gaps else []
    problems += [f"/health took {health:.2f} s"] if health >= _HEALTH_SECONDS else []
    problems += [f"{found['failed']} answers of 5xx"] if found["failed"] else []
    problems += [f"memory grew to {after / before:.3f}"] if after > _GROWTH * before else []
    print(*(f"broken: {problem}" for problem in problems), sep="\n")
    print(json.dumps(found))
    return problems


def main() -> int:
    """Start the server and all clients; return 1 if a bound was exceeded."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="demo", help="tiny: a random one that is made for it")
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--clients", type=int, default=200)
    parser.add_argument(
        "--kinds", nargs="+", choices=[*KINDS, *SCHEMA_KINDS], metavar="KIND",
        help="these alone; default: all",
    )  # fmt: skip
    parser.add_argument("--log", type=Path, help="a file for what the server says")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        model = options.model
        if model == "tiny":
            from tests.server.checkpoint import save_served_checkpoint

            model = save_served_checkpoint(Path(directory) / "tiny")
        with running_server(model, TANDEM_API_KEY=KEY) as server:
            ours, theirs = multiprocessing.Pipe()
            honest = multiprocessing.get_context("spawn").Process(
                target=_be_honest, args=(server.port, options.minutes * 60, theirs)
            )
            honest.start()
            target = Target(server.port, KEY)
            os.nice(_NICENESS)
            memory = asyncio.run(_attack_all(target, server.process.pid, options))
            observed = ours.recv()
            honest.join()
            is_alive = server.process.poll() is None
            if options.log is not None:
                options.log.write_text(server.log)
    problems = _judge(observed, target, memory)
    return 1 if problems or not is_alive else 0


if __name__ == "__main__":
    sys.exit(main())
