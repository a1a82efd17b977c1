"""Sends requests generated from the API description and at random: python -m tests.server.abuse

Answers must match the description, and none may be a server error. Hand-written requests follow.
"""

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.server.checkpoint import save_served_checkpoint
from tests.server.drawn import send_drawn
from tests.server.malformed import send_all
from tests.server.running import RunningServer, running_server

COMMAND = Path(sys.executable).with_name("st")
# Valid requests are answered too; a small context keeps their answers short.
FLAGS = ("--context", "96", "--context-full", "trim")
_CHECKS = "not_a_server_error,content_type_conformance,status_code_conformance"


def send(
    server: RunningServer, *, phases: str, examples: int
) -> "subprocess.CompletedProcess[str]":
    """Let Schemathesis send requests; fails if one of its checks fails."""
    with tempfile.TemporaryDirectory() as directory:  # it writes notes to its working directory
        return subprocess.run(
            [str(COMMAND), "run", f"{server.address}/openapi.json", "--checks", _CHECKS,
             "--phases", phases, "--max-examples", str(examples), "--generation-deterministic",
             "--no-color", "--continue-on-failure", "--request-timeout", "60"],
            cwd=directory, capture_output=True, text=True, check=False,
        )  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--examples", type=int, default=40, help="per operation")
    parser.add_argument("--drawn", type=int, default=3000, help="over all endpoints")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        checkpoint = save_served_checkpoint(Path(directory) / "tiny")
        with running_server(checkpoint, *FLAGS, cache=Path(directory)) as server:
            done = send(server, phases="coverage,fuzzing", examples=options.examples)
            print(done.stdout)
            number, problems = send_all(server)
        with running_server(checkpoint, cache=Path(directory)) as server:
            problems += send_drawn(server, options.drawn)
    number += options.drawn
    print(f"{number} requests by hand and by chance, {len(problems)} answered as they must not be")
    print(*problems, sep="\n")
    return 0 if done.returncode == 0 and not problems else 1


if __name__ == "__main__":
    sys.exit(main())
