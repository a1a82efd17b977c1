"""Runs two replicas of a model on a local Ray: python -m tests.server.local_ray [MODEL]

Prints one JSON object: the running replicas, the answered texts, and how many of them one of the
replicas answered.
"""

import json
import re
import sys
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from typing import Any

_PROMPTS = 8
PORT = 8321


def ask(address: str, number: int) -> str:
    body = {
        "messages": [{"role": "user", "content": f"Count to {number}."}],
        "max_tokens": 6,
        "temperature": 0,
    }
    request = urllib.request.Request(
        f"{address}/v1/chat/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=120) as response:
        text: str = json.load(response)["choices"][0]["message"]["content"]
    return text


def num_chats(address: str) -> float:
    """Return how many chats the replica that answers this request has had."""
    with urllib.request.urlopen(f"{address}/metrics", timeout=60) as response:
        text = response.read().decode()
    chats = re.search(r'tandem_requests_total{endpoint="chat",status="200"} (\S+)', text)
    return float(chats[1]) if chats else 0.0


def main() -> int:
    import ray
    from ray import serve

    from tandem.cli.replicas import application

    model = sys.argv[1] if len(sys.argv) > 1 else "demo"
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False)
    serve.start(http_options={"host": "127.0.0.1", "port": PORT})
    # Packed linear layers are batch-invariant, so that answers can be compared.
    arguments = {"model": model, "replicas": "2", "threads": "1", "dense_dtype": "bf16"}
    found: dict[str, Any] = {}
    try:
        serve.run(application(arguments))
        status = serve.status()
        found["replicas"] = dict(
            status.applications["default"].deployments["tandem"].replica_states
        )
        address = f"http://127.0.0.1:{PORT}"
        with ThreadPoolExecutor(_PROMPTS) as pool:
            texts = list(pool.map(lambda n: ask(address, n), range(_PROMPTS)))
            again = list(pool.map(lambda n: ask(address, n), range(_PROMPTS)))
        found["are_equal"] = texts == again
        found["texts"] = texts
        found["answered"] = len(texts) + len(again)
        found["answered_by_one"] = num_chats(address)
    finally:
        serve.shutdown()
        ray.shutdown()
    print(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
