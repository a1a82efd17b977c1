"""Tries real clients on the running server: python -m tests.clients [NAME...] [--write-docs]

Not in CI: each client is installed from the package index into build/clients/NAME first.
"""

import argparse
import contextlib
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from tandem.cli.model_choice import ModelChoice, find_model
from tests.clients.environment import Report, client_names, try_client
from tests.clients.table import write_table
from tests.clients.trying import Served
from tests.server.checkpoint import save_served_checkpoint
from tests.server.running import running_server


def main() -> int:
    known = client_names()
    parser = argparse.ArgumentParser(prog="python -m tests.clients", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(known)}")
    parser.add_argument("--model", choices=("demo", "tiny"), default="demo")
    parser.add_argument("--write-docs", action="store_true", help="their lines in docs/clients.md")
    options = parser.parse_args()
    if unknown := set(options.names) - set(known):
        parser.error(f"no script for {', '.join(sorted(unknown))}; there is {', '.join(known)}")
    commit = _commit()
    reports = []
    with _serve(options.model) as served:
        for name in options.names or known:
            reports.append(try_client(name, served))
            print(reports[-1], flush=True)
    if options.write_docs:
        write_table(reports, commit)
    return _verdict(reports)


def _verdict(reports: list[Report]) -> int:
    working = sum(report.works for report in reports)
    print(f"{working} of {len(reports)} clients work")
    return 0 if working == len(reports) else 1


def _commit() -> str:
    """Return the commit under test; called first, because commits may be added meanwhile."""
    command = ["git", "rev-parse", "--short", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


@contextlib.contextmanager
def _serve(model: str) -> Iterator[Served]:
    """Serve the demo model, or a tiny random one, on a free port."""
    with tempfile.TemporaryDirectory() as temporary:
        if model == "demo":
            directory = Path(find_model(ModelChoice(model="demo"), quiet=False).model)
        else:
            directory = save_served_checkpoint(Path(temporary) / "tiny")
        with running_server(directory, "--name", model, "--context", "2048") as server:
            yield Served(server.address, model, directory)


if __name__ == "__main__":
    sys.exit(main())
