"""Tries guidellm, a server benchmark, with synthetic prompts in the model's own tokens."""

# /// script
# # torch comes first: alone it may bring gigabytes of CUDA.
# dependencies = ["torch==2.13.0", "guidellm"]
# [tool.tandem]
# in_turns = true
# ///

import json
import sys
import tempfile
from pathlib import Path

from tests.clients.trying import Served, report, run_command

_OUTPUT_TOKENS = 8


def chat_one_by_one(served: Served) -> str:
    return _benchmark(served, "/v1/chat/completions", "kind=synchronous", requests=2)


def completions_two_at_a_time(served: Served) -> str:
    return _benchmark(served, "/v1/completions", "kind=concurrent,streams=2", requests=4)


def _benchmark(served: Served, form: str, profile: str, *, requests: int) -> str:
    """Run a benchmark; every request must succeed with exactly the requested number of tokens."""
    with tempfile.TemporaryDirectory() as temporary:
        found = Path(temporary) / "report.json"
        run_command(
            "guidellm", "run",
            "--backend", f"kind=openai_http,target={served.address},request_format={form}",
            "--profile", profile, "--constraint", f"kind=max_requests,count={requests}",
            "--tokenizer", f"kind=huggingface_auto,model={served.directory}",
            "--data", f"kind=synthetic_text,prompt_tokens=16,output_tokens={_OUTPUT_TOKENS}",
            "--output", f"kind=json,path={found}", "--disable-console", cwd=temporary,
        )  # fmt: skip
        (benchmark,) = json.loads(found.read_text(encoding="utf-8"))["benchmarks"]
    results = benchmark["requests"]
    errors = [one["info"]["error"] for one in results["errored"]]
    assert (len(results["successful"]), errors) == (requests, []), errors
    assert {one["output_tokens"] for one in results["successful"]} == {_OUTPUT_TOKENS}
    return f"{requests} requests of {_OUTPUT_TOKENS} tokens"


if __name__ == "__main__":
    tries = [chat_one_by_one, completions_two_at_a_time]
    sys.exit(report("guidellm", tries))
