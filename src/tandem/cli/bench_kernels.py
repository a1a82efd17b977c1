"""`tandem bench kernels`: the expert kernels against this machine's ceilings and other systems."""

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from tandem.core.config import option, require_range
from tandem.core.errors import ConfigError

if TYPE_CHECKING:
    from tandem.bench.kernels import Case, KernelBench


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelBenchOptions:
    """What `tandem bench kernels` knows."""

    shape: str = option("qwen3-30b-a3b", help="expert shape", metavar="NAME")
    format: str = option("bf16,int8,int4,mxfp4", help="weight formats", metavar="A,B,...")
    tokens: str = option("1,4,128,512", help="tokens of each expert", metavar="N,M,...")
    threads: int | None = option(None, help="threads; default: all physical cores", metavar="N")
    peers: bool = option(
        False, help="also time torch, llama.cpp and kt-kernel, those that are installed, in turn"
    )
    json: bool = option(False, help="last line of standard output: one JSON object")

    def __post_init__(self) -> None:
        """Check the ranges."""
        if self.threads is not None:
            require_range("threads", self.threads, 1, 1024, what="a number of threads")

    def token_counts(self) -> list[int]:
        """Return the numbers of tokens; `ConfigError` for what is none."""
        counts = []
        for word in self.tokens.split(","):
            if not word.strip().isdecimal() or not 1 <= int(word) <= 65536:
                raise ConfigError(
                    f"tokens has {word.strip()!r}; expected numbers in 1..65536 such as 1,4,128"
                )
            counts.append(int(word))
        return counts


def run_kernels(options: KernelBenchOptions) -> int:
    """Measure and print; returns the exit code."""
    from tandem.bench.kernels import KernelBench, machine
    from tandem.kernels.cpu import detect_cpu
    from tandem.kernels.formats.weight_format import find_format

    tokens = options.token_counts()
    formats = [find_format(name.strip()).name for name in options.format.split(",")]
    missing = _missing_peers() if options.peers else {}
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
    cases = []
    print(f"{'format':12} {'tokens':>6} {'us':>9} {'GB/s':>7} {'Gop/s':>7}  share of ceiling")
    for name in formats:
        peers = _peers_with(name, missing) if options.peers else []
        cases += _measure(bench, options.shape, name, tokens, peers)
    missing |= bench.failures
    for peer, reason in missing.items():
        print(f"{peer}: {reason}")
    if options.json:
        report: dict[str, Any] = {"machine": ceiling, "cases": [asdict(case) for case in cases]}
        print(json.dumps({**report, "missing_peers": missing}))
    return 0


def _missing_peers() -> dict[str, str]:
    from tandem.bench.peers import PEERS

    reasons = {name: peer.why_missing() for name, peer in PEERS.items()}
    return {name: reason for name, reason in reasons.items() if reason is not None}


def _peers_with(format_name: str, missing: dict[str, str]) -> list[str]:
    from tandem.bench.peers import PEERS

    return [n for n, peer in PEERS.items() if n not in missing and peer.supports(format_name)]


def _measure(
    bench: "KernelBench", shape: str, name: str, tokens: Sequence[int], peers: Sequence[str]
) -> "list[Case]":
    cases = []
    for case in bench.cases(shape, name, tokens, peers):
        who = case.format if case.peer is None else ""
        line = (
            f"{who:12} {case.tokens:6} {case.microseconds:9.0f} "
            f"{case.gigabytes_per_second:7.1f} {case.gops:7.0f}  "
            f"{case.share_of_ceiling:4.0%} of {case.bound}"
        )
        if case.ratio is not None:
            line += f"  {case.peer} ({case.peer_format}): Tandem is {case.ratio:.2f}x as fast"
        print(line, flush=True)
        cases.append(case)
    return cases
