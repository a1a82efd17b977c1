"""`tandem bench kernels`: the expert kernels against this machine's ceilings."""

import json
import os
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from tandem.core.config import option, require_range
from tandem.core.errors import ConfigError

if TYPE_CHECKING:
    from tandem.bench.kernels import Case, Timed, Work

    StartPeers = Callable[[Work, dict[str, str]], AbstractContextManager[Mapping[str, Timed]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelBenchOptions:
    """Options of `tandem bench kernels`."""

    shape: str = option("qwen3-30b-a3b", help="expert shape", metavar="NAME")
    format: str = option("bf16,int8,int4,mxfp4", help="weight formats", metavar="A,B,...")
    tokens: str = option("1,4,128,512", help="numbers of tokens per expert", metavar="N,M,...")
    threads: int | None = option(
        None, help="CPU threads (default: one for each fast core)", metavar="N"
    )
    json: bool = option(False, help="print one JSON object on the last line of standard output")

    def __post_init__(self) -> None:
        """Check the ranges."""
        if self.threads is not None:
            require_range("threads", self.threads, 1, 1024, what="a number of threads")

    def token_counts(self) -> list[int]:
        """Return the token counts; raises `ConfigError` unless all are numbers in 1..65536."""
        counts = []
        for word in self.tokens.split(","):
            if not word.strip().isdecimal() or not 1 <= int(word) <= 65536:
                raise ConfigError(
                    f"tokens has {word.strip()!r}; expected numbers in 1..65536 such as 1,4,128"
                )
            counts.append(int(word))
        return counts


def run_kernels(options: KernelBenchOptions, start_peers: "StartPeers | None" = None) -> int:
    """Measure and print the results; returns the exit code.

    `start_peers(work, failures)` starts other systems, which are timed alternately with Tandem. For
    each system that is missing it must enter the reason in `failures`.
    """
    from tandem.bench.kernels import KernelBench, machine
    from tandem.kernels.cpu import detect_cpu
    from tandem.kernels.formats.weight_format import find_format

    tokens = options.token_counts()
    formats = [find_format(name.strip()).name for name in options.format.split(",")]
    cpu = detect_cpu()
    bench = KernelBench(
        num_threads=options.threads or cpu.num_threads, isa=os.environ.get("TANDEM_ISA", "")
    )
    ceiling = machine(bench)
    print(f"{cpu.model_name}, {ceiling['threads']} threads, {ceiling['isa']}")
    print(
        f"ceiling: read {ceiling['read_gigabytes_per_second']:.1f} GB/s, "
        f"int4 {ceiling['int4_gops']:.0f} Gop/s, int8 {ceiling['int8_gops']:.0f} Gop/s, "
        f"bf16 {ceiling['bf16_gflops']:.0f} Gflop/s\n"
    )
    cases = []
    print(f"{'format':12} {'tokens':>6} {'us':>9} {'GB/s':>7} {'Gop/s':>7}  share of ceiling")
    for name in formats:
        work = bench.work(options.shape, name, tokens)
        with start_peers(work, bench.failures) if start_peers else nullcontext() as peers:
            for case in bench.cases(options.shape, name, tokens, peers):
                print(_line(case), flush=True)
                cases.append(case)
    for peer, reason in bench.failures.items():
        print(f"{peer}: {reason}")
    if options.json:
        report: dict[str, object] = {"machine": ceiling, "cases": [asdict(case) for case in cases]}
        print(json.dumps({**report, "missing_peers": bench.failures}))
    return 0


def _line(case: "Case") -> str:
    who = case.format if case.peer is None else ""
    line = (
        f"{who:12} {case.tokens:6} {case.microseconds:9.0f} "
        f"{case.gigabytes_per_second:7.1f} {case.gops:7.0f}  "
        f"{case.share_of_ceiling:4.0%} of {case.bound}"
    )
    if case.ratio is not None:
        line += f"  {case.peer} ({case.peer_format}): Tandem is {case.ratio:.2f}x as fast"
    return line
