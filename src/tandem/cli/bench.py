"""`tandem bench kernels`: the expert kernels against this machine's ceilings."""

import argparse
import json
import os
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from tandem.core.config import add_flags, from_flags, option, require_range
from tandem.core.errors import ConfigError

if TYPE_CHECKING:
    from tandem.bench.kernels import Case, KernelBench


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelBenchOptions:
    """What `tandem bench kernels` knows."""

    shape: str = option("qwen3-30b-a3b", help="expert shape", metavar="NAME")
    formats: str = option(
        "bf16,int8,int4-g128,int4-g32,mxfp4", help="weight formats", metavar="A,B,..."
    )
    threads: int | None = option(None, help="threads; default: all physical cores", metavar="N")
    json: bool = option(False, help="last line of standard output: one JSON object")

    def __post_init__(self) -> None:
        """Check the ranges."""
        if self.threads is not None:
            require_range("threads", self.threads, 1, 1024, what="a number of threads")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `tandem bench`."""
    parser.add_argument("what", choices=("kernels",), help="what to measure")
    add_flags(parser, KernelBenchOptions)


def run(flags: argparse.Namespace) -> int:
    """Measure and print; returns the exit code."""
    options = from_flags(KernelBenchOptions, flags)
    from tandem.bench.kernels import KernelBench, machine
    from tandem.kernels.cpu import detect_cpu
    from tandem.kernels.formats.weight_format import find_format

    formats = [find_format(name.strip()).name for name in options.formats.split(",")]
    if not formats:
        raise ConfigError("formats is empty; expected names such as int4-g32,bf16")
    cpu = detect_cpu()
    bench = KernelBench(
        num_threads=options.threads or cpu.physical_cores, isa=os.environ.get("TANDEM_ISA", "")
    )
    ceiling = machine(bench)
    print(f"{cpu.model_name}, {ceiling['threads']} threads, {ceiling['isa']}")
    print(
        f"ceiling: read {ceiling['read_gigabytes_per_second']:.1f} GB/s, "
        f"int8 {ceiling['int8_gops']:.0f} Gop/s, bf16 {ceiling['bf16_gflops']:.0f} Gflop/s\n"
    )
    cases = _measure(bench, options.shape, formats)
    if options.json:
        print(json.dumps({"machine": ceiling, "cases": [asdict(case) for case in cases]}))
    return 0


def _measure(bench: "KernelBench", shape: str, formats: list[str]) -> "list[Case]":
    print(f"{'format':10} {'tokens':>6} {'us':>9} {'GB/s':>7} {'Gop/s':>7}  share of ceiling")
    cases = []
    for name in formats:
        for case in bench.cases(shape, name):
            print(
                f"{case.format:10} {case.tokens:6} {case.microseconds:9.0f} "
                f"{case.gigabytes_per_second:7.1f} {case.gops:7.0f}  "
                f"{case.share_of_ceiling:4.0%} of {case.bound}",
                flush=True,
            )
            cases.append(case)
    return cases
