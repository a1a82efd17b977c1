"""An hour of mixed load on one server: python -m benchmarks.server.steadiness [--minutes 60]

Eight clients send chats, long prompts, growing conversations and constrained answers by four APIs;
every third request is cancelled while it streams, or its client leaves at once. In the first third
the engine process is killed four times. `--kv-disk` lies in a file system of 64 MB (needs root),
which is soon full. Every request must be answered, or be told why not: a status from 400 on, or an
error in the stream. The server's memory is compared at half time and at the end.
Exits with 1 if a request was lost, memory grew by 2 %, or the log has a traceback.
"""

import argparse
import contextlib
import http.client
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.server.hostile import _server_bytes
from tests.server.running import RunningServer, running_server

_TEXT = (Path(__file__).parents[2] / "tests/data/wikitext_4096.txt").read_text(encoding="utf-8")
_SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer"}},
    "required": ["name", "age"],
}
_FULL_BYTES = 64 << 20
_KILLS = 4
_GROWTH = 1.02
_END_MARKS = (b"[DONE]", b'"done":true', b'"done": true', b"message_stop", b"response.completed",
              b"response.incomplete")  # fmt: skip
_CANCELLED, _LEFT = 0.2, 0.13


@dataclass(slots=True)
class Tally:
    """The outcomes of all requests, and the times of those that were answered."""

    outcomes: Counter[str] = field(default_factory=Counter)
    lost: list[str] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, kind: str, outcome: str, seconds: float, words: str = "") -> None:
        """Count an outcome."""
        with self.lock:
            self.outcomes[f"{kind}: {outcome}"] += 1
            if outcome == "answered":
                self.seconds.append(seconds)
            if outcome == "lost":
                self.lost.append(f"{kind}: {words}")


def bodies(chance: random.Random, history: list[dict[str, str]]) -> tuple[str, str, dict[str, Any]]:
    """Return a random request: its kind, path and body."""
    at = chance.randrange(len(_TEXT) - 9000)
    text, most = _TEXT[at : at + chance.choice((40, 400, 1600))], chance.choice((8, 24, 64))
    messages = [{"role": "user", "content": text}]
    chat = {"messages": messages, "max_tokens": most, "stream": True}
    match chance.choice(("chat", "whole", "long", "schema", "talk", "ollama", "messages", "items")):
        case "whole":
            return "whole", "/v1/chat/completions", {**chat, "stream": False}
        case "long":
            long = [{"role": "user", "content": _TEXT[at : at + 8000]}]
            return "long", "/v1/chat/completions", {**chat, "messages": long}
        case "schema":
            kind = {"type": "json_schema", "json_schema": {"name": "person", "schema": _SCHEMA}}
            return "schema", "/v1/chat/completions", {**chat, "response_format": kind}
        case "talk":
            history.append(messages[0])
            talk = {**chat, "messages": list(history)}
            history.append({"role": "assistant", "content": "I see. Go on."})
            if len(history) > 12:
                history.clear()
            return "talk", "/v1/chat/completions", talk
        case "ollama":
            options = {"num_predict": most}
            return "ollama", "/api/chat", {
                "model": "default", "messages": messages, "options": options
            }  # fmt: skip
        case "messages":
            body = {"model": "default", "messages": messages, "max_tokens": most, "stream": True}
            return "messages", "/v1/messages", body
        case "items":
            return "items", "/v1/responses", {
                "input": text, "max_output_tokens": most, "stream": True
            }  # fmt: skip
        case _:
            return "chat", "/v1/chat/completions", chat


def send(server: RunningServer, path: str, body: dict[str, Any], lines: int | None) -> str:
    """Send a request and read it to its end, or so many lines; return the outcome."""
    connection = server.connect()
    with contextlib.closing(connection):
        raw = json.dumps(body).encode()
        connection.request("POST", path, raw, {"Content-Type": "application/json"})
        if lines == 0:
            return "left"
        response = connection.getresponse()
        if response.status >= 400:
            return f"told {response.status}" if b"error" in response.read() else "lost"
        if lines is not None:
            for _ in range(lines):
                response.readline()
            return "cancelled"
        found = response.read()
        if b'"error"' in found.replace(b'"error":null', b"").replace(b'"error": null', b""):
            return "told in the stream"
        is_whole = not body.get("stream", path.startswith("/api"))
        ends = is_whole or any(mark in found[-4000:] for mark in _END_MARKS)
        return "answered" if ends else f"lost after {found[-200:]!r}"


def be_a_client(server: RunningServer, seed: int, has_ended: threading.Event, tally: Tally) -> None:
    """Send one request after the other."""
    chance, history = random.Random(seed), list[dict[str, str]]()
    while not has_ended.is_set():
        kind, path, body = bodies(chance, history)
        draw, lines = chance.random(), None
        if draw < _LEFT:
            lines = 0
        elif draw < _LEFT + _CANCELLED:
            lines = chance.randrange(1, 20)
        begin = time.monotonic()
        try:
            outcome = send(server, path, body, lines)
        except (OSError, http.client.HTTPException) as error:
            outcome = f"lost by {error!r}"
        seconds = time.monotonic() - begin
        if outcome.startswith("lost"):
            tally.add(kind, "lost", seconds, f"{outcome} after {seconds:.1f} s")
        else:
            tally.add(kind, outcome, seconds)


def run(server: RunningServer, options: argparse.Namespace, tally: Tally) -> list[int]:
    """Load the server and kill its engine; return the memory of each second."""
    has_ended, memory = threading.Event(), list[int]()
    clients = [
        threading.Thread(target=be_a_client, args=(server, seed, has_ended, tally))
        for seed in range(options.clients)
    ]
    begin, total = time.monotonic(), options.minutes * 60
    kills = [total / 3 * (number + 1) / (_KILLS + 1) for number in range(_KILLS)]
    for client in clients:
        client.start()
    while (now := time.monotonic() - begin) < total:
        if kills and now > kills[0]:
            kills.pop(0)
            os.kill(server.engine_process, signal.SIGKILL)
            server.wait_until_ready()
            continue
        with contextlib.suppress(OSError, StopIteration):  # a process has just ended
            memory.append(_server_bytes(server.process.pid))
        if len(memory) % 60 == 0:
            done = sum(tally.outcomes.values())
            print(f"{now / 60:.0f} min: {done} requests, {len(tally.lost)} lost", file=sys.stderr)
        time.sleep(1)
    has_ended.set()
    for client in clients:
        client.join()
    return memory


@contextlib.contextmanager
def small_disk(directory: Path) -> Iterator[Path]:
    """Mount a file system of 64 MB; without root, a directory that no size limits."""
    directory.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={_FULL_BYTES}", "tmpfs", str(directory)]
    is_small = os.geteuid() == 0 and subprocess.run(mount, check=False).returncode == 0
    try:
        yield directory
    finally:
        if is_small:
            subprocess.run(["umount", str(directory)], check=True)


def judge(tally: Tally, memory: list[int], server: RunningServer, used: float) -> list[str]:
    """Print the observations; return what is wrong."""
    for what, count in sorted(tally.outcomes.items()):
        print(f"{count:7} {what}")
    tenth = max(1, len(memory) // 10)
    middle = memory[len(memory) // 2 :][:tenth]
    before, after = statistics.median(middle), statistics.median(memory[-tenth:])
    print(json.dumps({
        "requests": sum(tally.outcomes.values()), "lost": len(tally.lost),
        "engine_restarts": server.metric("tandem_engine_restarts_total"),
        "kv_disk_used_share": round(used, 3),
        "memory_at_half_time_mib": round(before / 2**20, 1),
        "memory_at_the_end_mib": round(after / 2**20, 1),
        "median_seconds": round(statistics.median(tally.seconds or [0.0]), 2),
    }))  # fmt: skip
    problems = [f"lost: {words}" for words in tally.lost[:20]]
    problems += [f"memory grew to {after / before:.3f}"] if after > _GROWTH * before else []
    problems += ["a traceback in the log"] if "Traceback" in server.log else []
    problems += ["the server has ended"] if server.process.poll() is not None else []
    print(*(f"broken: {problem}" for problem in problems), sep="\n")
    return problems


def main() -> int:
    """Run it; return 1 if something was wrong."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="demo", help="tiny: a random one that is made for it")
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--log", type=Path, help="a file for what the server says")
    options = parser.parse_args()
    with TemporaryDirectory() as folder, small_disk(Path(folder) / "cache") as cache:
        model = options.model
        if model == "tiny":
            from tests.server.checkpoint import save_served_checkpoint

            model = save_served_checkpoint(Path(folder) / "tiny")
        elif model == "demo":
            from tandem.cli.keeping import cache_dir
            from tandem.demo.store import ensure_demo_model

            model = ensure_demo_model("demo", cache_dir=cache_dir())
        with running_server(model, "--kv-disk", "1GB", cache=cache) as server:
            tally = Tally()
            memory = run(server, options, tally)
            kind = os.statvfs(cache)
            problems = judge(tally, memory, server, 1 - kind.f_bavail / kind.f_blocks)
            if options.log is not None:
                options.log.write_text(server.log)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
