"""How fast a server answers during a long prompt: python -m benchmarks.server.long_prompt

While a prompt of 100,000 tokens is computed, /health, /metrics and /v1/models are requested every
50 ms. The model is a random Qwen3-MoE with a token per character. The last line is JSON: the
longest and the 99th percentile of each path's times. Exits with 1 if one took 100 ms or more.
"""

import argparse
import contextlib
import http.client
import json
import sys
import tempfile
import threading
import time
from pathlib import Path

from tests.conftest import REPOSITORY
from tests.server.checkpoint import save_served_checkpoint
from tests.server.running import RunningServer, running_server

_TEXT = (REPOSITORY / "tests/data/wikitext_4096.txt").read_text(encoding="utf-8")
_CONTEXT = 131_072
_PATHS = ("/health", "/metrics", "/v1/models")
_PAUSE_SECONDS, _BOUND_SECONDS, _PATIENCE_SECONDS = 0.05, 0.1, 900.0


def send(server: RunningServer, text: str) -> int:
    """Send the prompt; return the answer's status."""
    body = json.dumps({"prompt": text, "max_tokens": 1}).encode()
    connection = http.client.HTTPConnection(server.host, server.port, timeout=_PATIENCE_SECONDS)
    with contextlib.closing(connection):
        connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
        return connection.getresponse().status


def main() -> int:
    """Measure and print; return 1 if an answer was late."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=100_000)
    parser.add_argument("--layers", type=int, default=4)
    options = parser.parse_args()
    text = (_TEXT.encode("ascii", "ignore").decode() * 30)[: options.tokens]
    times: dict[str, list[float]] = {path: [] for path in _PATHS}
    with tempfile.TemporaryDirectory() as folder:
        model = save_served_checkpoint(
            Path(folder), context=_CONTEXT, num_hidden_layers=options.layers
        )
        with running_server(model) as server:
            begin, statuses, statuses_of_paths = time.monotonic(), list[int](), set[int]()
            prompt = threading.Thread(target=lambda: statuses.append(send(server, text)))
            prompt.start()
            while prompt.is_alive():
                for path, found in times.items():
                    sent = time.monotonic()
                    statuses_of_paths.add(server.ask("GET", path).status)
                    found.append(time.monotonic() - sent)
                time.sleep(_PAUSE_SECONDS)
            seconds = time.monotonic() - begin
    longest = {path: max(found) for path, found in times.items()}
    nearly = {path: sorted(found)[int(0.99 * len(found))] for path, found in times.items()}
    print(json.dumps({
        "status": statuses[0], "prompt_seconds": round(seconds, 1),
        "requests": len(times["/health"]),
        "longest_seconds": {path: round(value, 4) for path, value in longest.items()},
        "99th_seconds": {path: round(value, 4) for path, value in nearly.items()},
    }))  # fmt: skip
    return (
        1
        if statuses != [200]
        or statuses_of_paths != {200}
        or max(longest.values()) >= _BOUND_SECONDS
        else 0
    )


if __name__ == "__main__":
    sys.exit(main())
