"""Tries aiperf, a server benchmark, with synthetic prompts in the model's own tokens."""

# /// script
# dependencies = ["aiperf"]
# ///

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.clients.trying import Served, report, run_command

_OUTPUT_TOKENS = 8
_REQUESTS = 4


def chat_streams(served: Served) -> str:
    return _benchmark(served, "chat", "--streaming")


def usage_in_every_chunk(served: Served) -> str:
    return _benchmark(
        served, "chat", "--streaming", "--use-server-token-count", "--per-chunk-usage"
    )


def completions(served: Served) -> str:
    return _benchmark(served, "completions", "--use-legacy-max-tokens")


def _benchmark(served: Served, kind: str, *flags: str) -> str:
    """Run a benchmark; every request must succeed, and aiperf must read the server's metrics."""
    with tempfile.TemporaryDirectory() as temporary:
        run_command(
            "aiperf", "profile", "-m", served.name,
            "--url", served.address, "--endpoint-type", kind, "--tokenizer", str(served.directory),
            "--prompt-input-tokens-mean", "16", "--prompt-output-tokens-mean", str(_OUTPUT_TOKENS),
            "--extra-inputs", "ignore_eos:true", "--extra-inputs", f"min_tokens:{_OUTPUT_TOKENS}",
            "--request-count", str(_REQUESTS), "--concurrency", "2", "--workers-max", "1",
            "--output-artifact-dir", temporary, "--ui", "none", "--no-gpu-telemetry", *flags,
            env=_variables(), cwd=temporary,
        )  # fmt: skip
        found = _read(temporary, "profile_export_aiperf.json")
        metrics = _read(temporary, "server_metrics_export.json")
    assert found["error_summary"] == []
    assert found["request_count"]["avg"] == _REQUESTS
    assert "tandem_generated_tokens" in str(metrics)
    # The server's count: tokenizing the text again may give fewer tokens.
    assert found["usage_completion_tokens"]["min"] == _OUTPUT_TOKENS
    return f"{_REQUESTS} requests of {_OUTPUT_TOKENS} tokens"


def _read(directory: str, name: str) -> Any:
    return json.loads((Path(directory) / name).read_text(encoding="utf-8"))


def _variables() -> dict[str, str]:
    """Return the environment variables; offline, aiperf opens no tokenizer from a directory."""
    return {key: value for key, value in os.environ.items() if key != "HF_HUB_OFFLINE"}


if __name__ == "__main__":
    tries = [chat_streams, usage_in_every_chunk, completions]
    sys.exit(report("aiperf", tries))
