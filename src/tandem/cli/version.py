"""`tandem --version`: Tandem's version; with -v, of what it runs on too. Imports no torch."""

import argparse
import os
import platform
from importlib.metadata import version


def run(flags: argparse.Namespace) -> int:
    """Print; returns the exit code."""
    lines = [f"tandem {version('tandem-moe')}"]
    if flags.verbose:
        lines.append(f"python {platform.python_version()}")
        lines += [f"{package} {version(package)}" for package in ("torch", "transformers")]
        lines.append(f"kernels {_instruction_set()}")
    print("\n".join(lines))
    return 0


def _instruction_set() -> str:
    from tandem.kernels.engine import choose_isa

    return choose_isa(os.environ.get("TANDEM_ISA", ""))
