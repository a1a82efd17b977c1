"""Tandem's expert kernels and other systems' on the same shapes, timed in turn.

    python -m benchmarks.kernels.peers --format bf16,int4-g32,mxfp4 --tokens 1,4,64,256

It has the flags and the output of `tandem bench kernels`. Below each case come torch, llama.cpp and
kt-kernel, as far as they are installed, and Tandem's speed over theirs. With `--json` the last line
of standard output is one JSON object.
"""

import argparse
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager

from benchmarks.kernels.peers import PEERS
from benchmarks.kernels.peers.process import PeerProcess

from tandem.bench.kernels import Work
from tandem.cli.bench_kernels import KernelBenchOptions, run_kernels
from tandem.cli.failures import report_failure
from tandem.core.config import add_flags, from_flags
from tandem.core.errors import TandemError


def main() -> int:
    """Measure and print; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.kernels.peers")
    add_flags(parser, KernelBenchOptions)
    flags = parser.parse_args()
    try:
        return run_kernels(from_flags(KernelBenchOptions, flags), start_peers)
    except (TandemError, OSError, KeyboardInterrupt) as error:
        return report_failure(error, has_json=bool(flags.json))


@contextmanager
def start_peers(work: Work, failures: dict[str, str]) -> Iterator[Mapping[str, PeerProcess]]:
    """Start every peer that is installed and supports the format; record why others are missing."""
    started: dict[str, PeerProcess] = {}
    with ExitStack() as stack:
        for name, peer in PEERS.items():
            if (reason := peer.why_missing()) is not None:
                failures[name] = reason
            elif peer.supports(work.format):
                try:
                    started[name] = stack.enter_context(closing(PeerProcess(name, work)))
                except OSError as error:
                    failures[f"{name}, {work.format}"] = str(error)
        yield started


if __name__ == "__main__":
    sys.exit(main())
