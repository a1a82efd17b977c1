"""`tandem --version`: prints Tandem's version; with -v also its dependencies' versions.

This module imports no torch.
"""

import argparse
import os
import platform
from importlib.metadata import version


def run(flags: argparse.Namespace) -> int:
    """Print the versions; returns the exit code."""
    print("\n".join(version_lines(is_verbose=flags.verbose)))
    return 0


def version_lines(*, is_verbose: bool = True) -> list[str]:
    """Return lines with Tandem's version and, if verbose, with those of its dependencies."""
    lines = [f"tandem {version('tandem-moe')}"]
    if is_verbose:
        from tandem.kernels.engine import choose_isa

        lines.append(
            f"python {platform.python_version()}, {platform.system()} {platform.release()}"
        )
        lines += [f"{package} {version(package)}" for package in ("torch", "transformers")]
        lines.append(f"kernels {choose_isa(os.environ.get('TANDEM_ISA', ''))}")
    return lines
