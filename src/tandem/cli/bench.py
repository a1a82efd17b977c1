"""`tandem bench`: measures the kernels if its argument is `kernels`, otherwise a whole model."""

import argparse
import dataclasses

from tandem.cli.bench_kernels import KernelBenchOptions, run_kernels
from tandem.cli.bench_model import ModelBenchOptions, run_model
from tandem.cli.model_choice import ModelChoice
from tandem.core.config import add_flags, from_flags

KERNELS = "kernels"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `tandem bench`."""
    parser.add_argument(
        "what", nargs="?", metavar="kernels|MODEL",
        help="kernels (experts alone), or a model's directory or name (default: --shape)",
    )  # fmt: skip
    add_flags(parser, ModelChoice)
    add_flags(parser, KernelBenchOptions)
    known = [field.name for field in dataclasses.fields(KernelBenchOptions)]
    add_flags(parser, ModelBenchOptions, known=known)


def run(flags: argparse.Namespace) -> int:
    """Measure and print the results; returns the exit code."""
    if flags.what == KERNELS:
        return run_kernels(from_flags(KernelBenchOptions, flags))
    flags.model = flags.what
    choice = None if flags.what is None else from_flags(ModelChoice, flags)
    return run_model(from_flags(ModelBenchOptions, flags), choice)
