"""`tandem bench`: what is measured is its first word."""

import argparse

from tandem.cli.bench_kernels import KernelBenchOptions, run_kernels
from tandem.core.config import add_flags, from_flags


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `tandem bench`."""
    parser.add_argument("what", choices=("kernels",), help="what to measure")
    add_flags(parser, KernelBenchOptions)


def run(flags: argparse.Namespace) -> int:
    """Measure and print; returns the exit code."""
    return run_kernels(from_flags(KernelBenchOptions, flags))
