"""The server's cost beside the same model in a program: python -m benchmarks.server.overhead

Four figures, each between measurements of its reference, in one run: tokens per second of one
stream against `Generator` in the same process; those of four streams against one, with the bytes'
limit; the share of eight streams' time in which no recorded step runs; and the time from a
client's disconnection until the next request begins.
"""

import argparse
import itertools
import json
import os
import signal
import socket
import statistics
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.server.paired import PROMPT
from tests.server.running import RunningServer, running_server

_STREAMS = 4
_STREAMS_OUTSIDE = 8


def stream_gaps(server: RunningServer, tokens: int, text: str = PROMPT) -> list[float]:
    """Return the seconds between the tokens of one stream.

    Data is stored as it arrives and parsed at the end, because a client that parses would take
    processor time from the server.
    """
    body = {
        "messages": [{"role": "user", "content": text}], "stream": True, "max_tokens": tokens,
        "temperature": 0,
    }  # fmt: skip
    data = json.dumps(body).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(data)}"
    head += "\r\nContent-Type: application/json\r\nConnection: close\r\n\r\n"
    pieces: list[tuple[float, bytes]] = []
    with socket.create_connection((server.host, server.port)) as connection:
        connection.sendall(head.encode() + data)
        while piece := connection.recv(1 << 16):
            pieces.append((time.perf_counter(), piece))
    times = []
    for when, piece in pieces:  # one token, but for characters of several
        times += [when] * piece.count(b'"delta":{"content"')
    return [after - before for before, after in itertools.pairwise(times)]


class Turns:
    """The two ways to answer, one after the other; each is idle while the other works."""

    def __init__(self, server: RunningServer) -> None:
        """Find the engine process of a server as `paired` starts it."""
        self._server = server
        self._results = Path(server.ready_message["results"])
        self._engine_process = server.engine_process
        self.step_bytes: dict[str, float] = {}

    def _written(self, number: signal.Signals) -> Any:
        """Send a signal to the engine process; return what it writes for it."""
        num_before = len(self._lines())
        os.kill(self._engine_process, number)
        while len(lines := self._lines()) == num_before:
            time.sleep(0.05)
        return json.loads(lines[-1])

    def steps(self) -> list[list[float]]:
        """Return when each recorded step since the last call began and ended, in seconds."""
        found: list[list[float]] = self._written(signal.SIGUSR2)["steps"]
        return found

    def of_generator(self) -> list[float]:
        """Let the engine process answer by itself; return the seconds between tokens."""
        last = self._written(signal.SIGUSR1)
        self.step_bytes = last["step_bytes"]
        gaps: list[float] = last["gaps"]
        return gaps

    def of_server(self, tokens: int) -> list[float]:
        """Request the same answer from the server; return the seconds between tokens."""
        return stream_gaps(self._server, tokens)

    def _lines(self) -> list[str]:
        return self._results.read_text(encoding="utf-8").splitlines()


def overhead(turns: Turns, rounds: int, tokens: int) -> Any:
    """Return the median seconds per token of both, and the median of paired ratios.

    The order alternates, so that a machine that drifts favours neither.
    """
    ours, theirs = [], []
    for turn in range(rounds + 1):
        kinds = ["generator", "server"] if turn % 2 else ["server", "generator"]
        found = {}
        for kind in kinds:
            gaps = turns.of_generator() if kind == "generator" else turns.of_server(tokens)
            found[kind] = statistics.median(gaps[tokens // 4 :])
        if turn:  # the first one records steps
            theirs.append(found["generator"])
            ours.append(found["server"])
    ratios = sorted(a / b - 1 for a, b in zip(ours, theirs, strict=True))
    low, median, high = statistics.quantiles(ratios, n=4)
    return {
        "generator_tokens_per_second": round(1 / statistics.median(theirs), 2),
        "server_tokens_per_second": round(1 / statistics.median(ours), 2),
        "overhead": round(median, 4),
        "overhead_quartiles": [round(low, 4), round(high, 4)],
        "overhead_microseconds_per_token": round(
            statistics.median(a - b for a, b in zip(ours, theirs, strict=True)) * 1e6
        ),
        "overhead_of_each_turn": [round(ratio, 4) for ratio in ratios],
    }


def concurrency(
    server: RunningServer, step_bytes: dict[str, float], rounds: int, tokens: int
) -> Any:
    """Return tokens per second of one stream and of four at once, in turn, and the bytes' limit.

    If a step cost only its bytes, four sequences would be faster than one by that limit.
    """
    one, four, ratios = [], [], []
    for turn in range(rounds + 1):
        texts = [f"{PROMPT} ({turn}, {n})" for n in range(_STREAMS)]
        single = 1 / statistics.median(stream_gaps(server, tokens)[tokens // 4 :])
        with ThreadPoolExecutor(_STREAMS) as pool:
            gaps = list(pool.map(lambda text: stream_gaps(server, tokens, text), texts))
        together = sum(1 / statistics.median(g[len(g) // 3 :]) for g in gaps)
        if turn:  # the first one records steps
            one.append(single)
            four.append(together)
            ratios.append(together / single)
    ratio, ceiling = statistics.median(ratios), _STREAMS * step_bytes["1"] / step_bytes["4"]
    return {
        "one_tokens_per_second": round(statistics.median(one), 2),
        "four_tokens_per_second": round(statistics.median(four), 2),
        "ratio": round(ratio, 3),
        "ratio_of_each_turn": [round(one, 3) for one in sorted(ratios)],
        "byte_ceiling_ratio": round(ceiling, 3),
        "share_of_ceiling": round(ratio / ceiling, 3),
    }


def outside(turns: Turns, server: RunningServer, rounds: int, tokens: int) -> Any:
    """Return which share of the time of eight streams passes between recorded steps.

    Sampling, bookkeeping, messages and the client's and HTTP process's use of the cores are in it.
    """
    shares, between = [], []
    for turn in range(rounds + 1):
        texts = [f"{PROMPT} ({turn}, {n})" for n in range(_STREAMS_OUTSIDE)]
        turns.steps()
        with ThreadPoolExecutor(_STREAMS_OUTSIDE) as pool:
            list(pool.map(lambda text: stream_gaps(server, tokens, text), texts))
        steps = turns.steps()
        steps = steps[len(steps) // 3 : -len(steps) // 6]  # all streams run
        seconds = steps[-1][0] - steps[0][0]
        inside = sum(end - start for start, end in steps[:-1])
        if turn:  # the first one records steps
            shares.append(1 - inside / seconds)
            between.append((seconds - inside) / (len(steps) - 1))
    return {
        "share_outside_steps": round(statistics.median(shares), 4),
        "share_outside_of_each_turn": [round(share, 4) for share in sorted(shares)],
        "seconds_between_steps": round(statistics.median(between), 6),
    }


def release(model: str, flags: list[str], rounds: int) -> Any:
    """Return the decode steps between a client's disconnection and the next request's work."""
    with running_server(model, "--max-running", "1", "--speculate", "none", *flags) as server:
        stream_gaps(server, 30)
        step = statistics.median(stream_gaps(server, 30))
        delays = []
        for turn in range(rounds):
            text = f"{turn} again"
            alone = first_token(server, text + "!")
            with server.streaming(PROMPT, max_tokens=400, temperature=0) as response:
                for _ in range(20):
                    response.readline()
                pool = ThreadPoolExecutor(1)
                waiting = pool.submit(first_token_at, server, text + "?")
                server.wait_for("tandem_requests_waiting", 1)
            left = time.perf_counter()
            delays.append(waiting.result() - left - alone)
            pool.shutdown()
    return {
        "step_seconds": round(step, 4),
        "seconds_until_free": round(statistics.median(delays), 4),
        "steps_until_free": round(statistics.median(delays) / step, 2),
    }


def first_token_at(server: RunningServer, text: str) -> float:
    """Return the time at which the first token of an answer came."""
    with server.streaming(text, max_tokens=2, temperature=0) as response:
        for line in response:
            if b'"content":' in line and b'"role"' not in line:
                return time.perf_counter()
    raise AssertionError("the answer had no text")


def first_token(server: RunningServer, text: str) -> float:
    """Return the seconds until the first token on an idle server."""
    begin = time.perf_counter()
    return first_token_at(server, text) - begin


def main() -> int:
    """Measure and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--expert-dtype", default="auto")
    parser.add_argument("--dense-dtype", default="auto")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--only", choices=("overhead", "streams", "outside", "release"))
    options = parser.parse_args()
    if options.rounds < 2:
        parser.error("--rounds is at least 2: the spread needs two rounds")
    flags = ["--expert-dtype", options.expert_dtype, "--dense-dtype", options.dense_dtype]
    found: dict[str, Any] = {}
    if options.only != "release":
        with running_server(
            options.model,
            *flags,
            "--tokens",
            str(options.tokens),
            module="benchmarks.server.paired",
        ) as server:
            turns = Turns(server)
            turns.of_generator()
            if options.only in (None, "overhead"):
                found |= overhead(turns, options.rounds, options.tokens)
            if options.only in (None, "streams"):
                found |= concurrency(server, turns.step_bytes, options.rounds, options.tokens)
            if options.only in (None, "outside"):
                found |= outside(turns, server, options.rounds, options.tokens)
    if options.only in (None, "release"):
        found |= release(options.model, flags, options.rounds)
    for name, value in found.items():
        print(f"{name}: {value}")
    print(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
