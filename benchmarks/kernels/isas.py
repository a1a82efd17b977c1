"""Two instruction sets in turns, call by call, for machines on which other programs run too.

    python -m benchmarks.kernels.isas [--isas amx avx512] [--format bf16] [--tokens 1 2 4]

Each call takes the next eight experts of Qwen3-30B-A3B, or the next matrix of 4,096 x 2,048, so
that weights come from memory. A figure is the first set's speed over the second's: the median over
pairs of calls, each of which begins with the other set. Prints one JSON object last.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial

import torch

from tandem.bench.random_weights import random_experts
from tandem.kernels.dense import CpuThreads, DenseWeight, multiply, pack_dense
from tandem.kernels.formats.expert import ExpertLayout
from tandem.kernels.formats.weight_format import WeightFormat, find_format
from tandem.kernels.native import ActivationKind, NativeActivation, compute_experts

HIDDEN, INNER, ACTIVE = 2048, 768, 8
DENSE_ROWS = 4096

Call = Callable[[CpuThreads, int], object]
"""Computes the n-th part of the weights."""


def main() -> None:
    """Time both sets and print a line per kind of layer and number of tokens."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--isas", nargs=2, default=["amx", "avx512"])
    parser.add_argument("--format", default="bf16")
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--pairs", type=int, default=200)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--experts", type=int, default=128, help="9 MB each in bf16")
    flags = parser.parse_args()
    sets = [CpuThreads(num_threads=flags.threads, isa=isa) for isa in flags.isas]
    fmt = find_format(flags.format)
    layout = ExpertLayout(fmt, HIDDEN, INNER, is_gated=True, has_bias=False)
    store, dense = random_experts(layout, flags.experts), _dense(fmt, flags.experts)
    ratios = {}
    for tokens in flags.tokens:
        calls: dict[str, Call] = {
            "experts": expert_call(layout, store, tokens),
            "dense": partial(_multiply, dense, torch.randn(tokens, HIDDEN)),
        }
        for kind, call in calls.items():
            seconds = _in_turns(call, sets, flags.pairs)
            ratio = statistics.median(b / a for a, b in zip(*seconds, strict=True))
            ratios[f"{kind}, {tokens}"] = ratio
            first, second = (statistics.median(each) * 1e6 for each in seconds)
            print(f"{kind:8} {tokens:3} tokens {first:9.0f} us {second:9.0f} us {ratio:6.3f}")
    print(json.dumps({"isas": flags.isas, "format": flags.format, "ratios": ratios}))


def _dense(fmt: WeightFormat, num_experts: int) -> list[DenseWeight]:
    """Return parts of about as many bytes as the experts have."""
    count = max(1, num_experts * 3 * INNER // DENSE_ROWS)
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(DENSE_ROWS, HIDDEN, generator=generator).bfloat16()
    return [pack_dense(weight, None, fmt) for _ in range(count)]


def _multiply(weights: Sequence[DenseWeight], x: torch.Tensor, threads: CpuThreads, n: int) -> None:
    multiply(threads, [weights[n % len(weights)]], x)


def expert_call(layout: ExpertLayout, store: torch.Tensor, tokens: int) -> Call:
    """Return calls of the next eight experts of a store, for so many tokens."""
    hidden = torch.randn(tokens, HIDDEN)
    begin = torch.arange(0, tokens * ACTIVE + 1, tokens, dtype=torch.int32)
    token = torch.arange(tokens, dtype=torch.int32).repeat(ACTIVE)
    activation = NativeActivation(ActivationKind.SWIGLU)
    out = torch.empty(tokens * ACTIVE, HIDDEN)

    def call(threads: CpuThreads, n: int) -> None:
        chosen = (torch.arange(ACTIVE) + n * ACTIVE) % len(store)
        addresses = chosen * layout.num_bytes + store.data_ptr()
        compute_experts(threads.engine, layout, addresses, activation, hidden, begin, token, out)

    return call


def _in_turns(call: Call, sets: Sequence[CpuThreads], pairs: int) -> list[list[float]]:
    """Return the seconds of each set's calls; each pair begins with the other set."""
    seconds: list[list[float]] = [[] for _ in sets]
    n = 0
    for pair in range(-2, pairs):  # the first two wake the threads
        for i in (0, 1) if pair % 2 else (1, 0):
            start = time.perf_counter()
            call(sets[i], n)
            taken = time.perf_counter() - start
            n += 1
            if pair >= 0:
                seconds[i].append(taken)
    return seconds


if __name__ == "__main__":
    main()
