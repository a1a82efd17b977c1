"""Replays real arrivals and lengths against a running server: python -m benchmarks.server.load

Requests arrive as in an hour of a large service (azure_conversations.csv), with their lengths, both
scaled to this machine: `--scale` shortens prompts and answers, and arrivals are spread to a given
share of the server's capacity, which is its rate when many requests wait. No request may fail;
memory is measured from beginning to end.
"""

import argparse
import contextlib
import csv
import json
import random
import statistics
import sys
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from tests.server.running import RunningServer, running_server

_ARRIVALS = Path(__file__).with_name("azure_conversations.csv")
_TEXT = (Path(__file__).parents[2] / "tests/data/wikitext_4096.txt").read_text(encoding="utf-8")
_CHARACTERS_PER_TOKEN = 4
_TRIALS = 32  # requests at once, by which the capacity is known
_KV_CACHE = 'tandem_memory_bytes{kind="kv_cache"}'


class Arrival(NamedTuple):
    """One request of the recorded hour."""

    seconds: float
    prompt_tokens: int
    generated_tokens: int


@dataclass
class Outcome:
    """The result of one request."""

    problem: str | None = None
    first_seconds: float = 0.0
    seconds: float = 0.0
    tokens: int = 0
    gaps: list[float] = field(default_factory=list)


def read_arrivals(scale: float) -> list[Arrival]:
    """Return the recorded requests with scaled lengths."""
    with _ARRIVALS.open(encoding="utf-8") as file:
        rows = csv.DictReader(line for line in file if not line.startswith("#"))
        return [
            Arrival(
                float(row["seconds"]),
                max(1, round(int(row["prompt_tokens"]) * scale)),
                max(1, round(int(row["generated_tokens"]) * scale)),
            )
            for row in rows
        ]


def send(server: RunningServer, arrival: Arrival, seed: int) -> Outcome:
    """Send one request as a stream and record the times of its tokens."""
    length = arrival.prompt_tokens * _CHARACTERS_PER_TOKEN
    first = random.Random(seed).randrange(len(_TEXT))
    prompt = (_TEXT * 2)[first : first + length]  # another beginning each time
    body = {
        "prompt": prompt, "max_tokens": arrival.generated_tokens, "temperature": 1.0, "seed": seed,
        "stream": True, "stream_options": {"include_usage": True},
    }  # fmt: skip
    outcome, begin = Outcome(), time.perf_counter()
    connection = server.connect()
    with contextlib.closing(connection):
        try:
            connection.request("POST", "/v1/completions", json.dumps(body),
                               {"Content-Type": "application/json"})  # fmt: skip
            response = connection.getresponse()
            if response.status != 200:
                outcome.problem = f"{response.status} {response.read()[:200]!r}"
                return outcome
            _read(response, outcome, begin)
        except OSError as error:
            outcome.problem = str(error)
    outcome.seconds = time.perf_counter() - begin
    return outcome


def _read(lines: Iterable[bytes], outcome: Outcome, begin: float) -> None:
    last = begin
    for line in lines:
        if not line.startswith(b"data: ") or line.startswith(b"data: [DONE]"):
            continue
        event = json.loads(line[6:])
        now = time.perf_counter()
        if "error" in event:
            outcome.problem = event["error"]["message"]
        elif event.get("usage"):
            outcome.tokens = event["usage"]["completion_tokens"]
        elif not outcome.first_seconds:
            outcome.first_seconds = now - begin
        else:
            outcome.gaps.append(now - last)
        last = now


def replay(server: RunningServer, arrivals: list[Arrival], stretch: float, seconds: float) -> Any:
    """Send requests when they are due, until `seconds` have passed; return their results."""
    outcomes: list[Outcome] = []
    threads: list[threading.Thread] = []
    memory = [server.metric('tandem_memory_bytes{kind="host"}')]
    begin = time.perf_counter()
    period = arrivals[-1].seconds * stretch
    number, waiting = 0, 0.0
    while True:
        token_output, place = divmod(number, len(arrivals))
        due = arrivals[place].seconds * stretch + token_output * period
        if due >= seconds:
            break
        time.sleep(max(0.0, begin + due - time.perf_counter()))
        arrival = arrivals[place]
        thread = threading.Thread(
            target=lambda a=arrival, n=number: outcomes.append(send(server, a, n))
        )
        thread.start()
        threads.append(thread)
        number += 1
        if number % 10 == 0:
            memory.append(server.metric('tandem_memory_bytes{kind="host"}'))
            waiting = max(waiting, server.metric("tandem_requests_waiting"))
    for thread in threads:
        thread.join()
    memory.append(server.metric('tandem_memory_bytes{kind="host"}'))
    return report(outcomes, memory, waiting, time.perf_counter() - begin)


def report(
    outcomes: list[Outcome], memory: list[float], most_waiting: float, seconds: float
) -> dict[str, Any]:
    """Return the figures."""
    done = [outcome for outcome in outcomes if outcome.problem is None]
    gaps = [gap for outcome in done for gap in outcome.gaps]
    half = len(memory) // 2
    return {
        "requests": len(outcomes),
        "failed": len(outcomes) - len(done),
        "problems": sorted({o.problem for o in outcomes if o.problem})[:5],
        "seconds": round(seconds, 1),
        "generated_tokens_per_second": round(sum(o.tokens for o in done) / seconds, 2),
        "time_to_first_token_seconds": quantiles([o.first_seconds for o in done]),
        "seconds_between_tokens": (between := quantiles(gaps)),
        "p95_gap_over_median": round(between["p95"] / between["p50"], 2) if between else None,
        "request_seconds": quantiles([o.seconds for o in done]),
        "most_waiting": int(most_waiting),
        "host_memory_bytes": {"begin": int(memory[0]), "half": int(memory[half]),
                              "end": int(memory[-1]), "most": int(max(memory))},
    }  # fmt: skip


def quantiles(values: list[float]) -> dict[str, float]:
    """Return the median, the 95th and the 99th percentile."""
    if len(values) < 2:
        return {}
    cuts = statistics.quantiles(values, n=100)
    return {name: round(cuts[place], 4) for name, place in (("p50", 49), ("p95", 94), ("p99", 98))}


def seconds_each(server: RunningServer, arrivals: list[Arrival]) -> float:
    """Return the server's seconds per request when it always has the most that it runs."""
    some = arrivals[:: max(1, len(arrivals) // _TRIALS)][:_TRIALS]
    seconds = 0.0
    for seed in (-1000, -2000):  # the first time everything is new
        threads = [
            threading.Thread(target=send, args=(server, arrival, seed - number))
            for number, arrival in enumerate(some)
        ]
        begin = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        seconds = time.perf_counter() - begin
    return seconds / len(some)


def main() -> int:
    """Run the replay and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--scale", type=float, default=0.25, help="of prompt and answer lengths")
    parser.add_argument("--share", type=float, default=0.8, help="of the server's capacity")
    options, flags = parser.parse_known_args()
    arrivals = read_arrivals(options.scale)
    with running_server(options.model, "--max-waiting", "200", *flags) as server:
        each = seconds_each(server, arrivals)
        mean_gap = arrivals[-1].seconds / (len(arrivals) - 1)
        stretch = each / options.share / mean_gap
        print(f"the server takes {each:.2f} s a request at capacity; one comes every "
              f"{each / options.share:.2f} s")  # fmt: skip
        kv_cache = server.metric(_KV_CACHE)
        found = replay(server, arrivals, stretch, options.minutes * 60)
        found["kv_cache_bytes"] = {"begin": int(kv_cache), "end": int(server.metric(_KV_CACHE))}
        found["restarts"] = int(server.metric("tandem_engine_restarts_total"))
    for name, value in found.items():
        print(f"{name}: {value}")
    print(json.dumps(found))
    return 0 if not found["failed"] and not found["restarts"] else 1


if __name__ == "__main__":
    sys.exit(main())
