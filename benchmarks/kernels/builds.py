"""Two builds of the native part in turns: is one compiler's build slower than another's?

    python -m benchmarks.kernels.builds A.so B.so [--isa avx512] [--rounds 5] [--from-memory]

Each build runs in a process of its own with one thread; the rounds alternate. A figure is the least
processor time of one call over all rounds, on data that stays in the processor's cache, so that
other programs hardly matter. B's speed over A's is printed.

With `--from-memory` each build has two threads, each call takes the next eight experts of
Qwen3-30B-A3B with as many tokens each as `--tokens` says, and a figure is the median time of a
round's calls, the least of all rounds.
"""

import argparse
import importlib.util
import json
import math
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

EXPERT_FORMATS = ("bf16", "int8", "int4", "int4z", "mxfp4", "fp8", "q4_k", "q6_k")
FORMATS_FROM_MEMORY = "int8,int4-g128,int4-g32,mxfp4,q4_k"
TOKENS = (1, 4, 64)
SECONDS = 0.15


def main() -> None:
    """Run both builds in turns and print a line per call."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("builds", nargs=2, type=Path)
    parser.add_argument("--isa", default="")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--from-memory", action="store_true")
    parser.add_argument("--experts", type=int, default=256, help="2.5 to 5 MB each")
    parser.add_argument("--format", default=FORMATS_FROM_MEMORY, help="from memory; with commas")
    parser.add_argument("--tokens", default="1,2,4,8", help="an expert, from memory; with commas")
    flags = parser.parse_args()
    from_memory = [str(flags.experts), flags.format, flags.tokens] if flags.from_memory else []
    best: list[dict[str, float]] = [{}, {}]
    for _ in range(flags.rounds):
        for build, least in zip(flags.builds, best, strict=True):
            for name, seconds in _measured(build, flags.isa, from_memory).items():
                least[name] = min(seconds, least.get(name, math.inf))
    ratios = {name: best[0][name] / best[1][name] for name in best[0]}
    for name, ratio in ratios.items():
        print(f"{name:28} {best[0][name] * 1e6:9.1f} us {best[1][name] * 1e6:9.1f} us {ratio:6.2f}")
    mean = math.exp(sum(map(math.log, ratios.values())) / len(ratios))
    print(f"{'geometric mean':28} {'':25} {mean:6.2f}")
    print(json.dumps({"isa": flags.isa, "ratios": ratios, "geometric_mean": mean}))


def _measured(build: Path, isa: str, from_memory: Sequence[str]) -> dict[str, float]:
    arguments = ["--child", str(build), isa, *from_memory]
    command = [sys.executable, "-m", "benchmarks.kernels.builds", *arguments]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True)
    seconds: dict[str, float] = json.loads(done.stdout)
    return seconds


def _child(build: str, isa: str, *from_memory: str) -> None:
    """Install the build as Tandem's native part, and print seconds by call.

    `from_memory` are a number of experts, their formats and the tokens of each; none: what stays in
    the cache is measured.
    """
    spec = importlib.util.spec_from_file_location("tandem.kernels._native", build)
    assert spec is not None
    assert spec.loader is not None
    sys.modules[spec.name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    if from_memory:
        print(json.dumps(dict(_from_memory(isa, *from_memory))))
        return
    calls = [*_experts(isa), *_attention(isa), *_quantising()]
    print(json.dumps({name: _least_seconds(call) for name, call in calls}))


def _from_memory(
    isa: str, num_experts: str, formats: str, tokens_each: str
) -> Iterator[tuple[str, float]]:
    """Yield the median seconds of calls whose experts were not used for long."""
    from benchmarks.kernels.isas import HIDDEN, INNER, expert_call

    from tandem.bench.random_weights import random_experts
    from tandem.kernels.dense import CpuThreads
    from tandem.kernels.formats.expert import ExpertLayout
    from tandem.kernels.formats.weight_format import find_format

    threads = CpuThreads(num_threads=2, isa=isa)
    for name in formats.split(","):
        layout = ExpertLayout(find_format(name), HIDDEN, INNER, is_gated=True, has_bias=False)
        store = random_experts(layout, int(num_experts))
        for tokens in map(int, tokens_each.split(",")):
            call = expert_call(layout, store, tokens)
            seconds: list[float] = []
            end = time.perf_counter() + 4 * SECONDS
            while time.perf_counter() < end or not seconds:
                start = time.perf_counter()
                call(threads, len(seconds))
                seconds.append(time.perf_counter() - start)
            yield f"experts {name}, {tokens}", statistics.median(seconds)


def _least_seconds(call: Callable[[], object]) -> float:
    call()
    least, end = math.inf, time.thread_time() + SECONDS
    while least == math.inf or time.thread_time() < end:
        start = time.thread_time()
        call()
        least = min(least, time.thread_time() - start)
    return least


def _experts(isa: str) -> Iterator[tuple[str, Callable[[], object]]]:
    """Return calls of two experts of 512 x 256, by format and number of tokens."""
    import torch

    from tandem.bench.random_weights import random_experts
    from tandem.kernels.engine import start_engine
    from tandem.kernels.formats.expert import ExpertLayout
    from tandem.kernels.formats.weight_format import find_format
    from tandem.kernels.native import ActivationKind, NativeActivation, compute_experts

    engine = start_engine(num_threads=1, isa=isa)
    activation = NativeActivation(ActivationKind.SWIGLU)
    for name in EXPERT_FORMATS:
        layout = ExpertLayout(find_format(name), 512, 256, is_gated=True, has_bias=False)
        store = random_experts(layout, 2)
        addresses = torch.arange(2) * layout.num_bytes + store.data_ptr()
        for tokens in TOKENS:
            hidden = torch.randn(tokens, 512)
            begin = torch.arange(0, 2 * tokens + 1, tokens, dtype=torch.int32)
            token = torch.arange(tokens, dtype=torch.int32).repeat(2)
            out = torch.empty(2 * tokens, 512)
            arguments = (engine, layout, addresses, activation, hidden, begin, token, out)
            yield f"experts {name}, {tokens}", partial(compute_experts, *arguments)


def _attention(isa: str) -> Iterator[tuple[str, Callable[[], object]]]:
    """Return calls of attention: 1 and 64 tokens at 512 positions, 8 heads on 2 KV heads."""

    from benchmarks.generation.attention import attend_call, filled

    from tandem.kernels.attention import AttentionForm
    from tandem.kernels.dense import CpuThreads

    threads = CpuThreads(num_threads=1, isa=isa)
    form = AttentionForm(num_heads=8, num_kv_heads=2, key_dim=64, value_dim=64, scale=0.125)
    for kv_dtype in ("bf16", "int8"):
        cache = filled(form, kv_dtype, 512, threads)
        for tokens in (1, 64):
            yield (
                f"attention {kv_dtype}, {tokens}",
                attend_call([cache], threads, 512 - tokens, tokens),
            )


def _quantising() -> Iterator[tuple[str, Callable[[], object]]]:
    """Return calls that quantise a 128 x 512 matrix in bf16, by TANDEM_ISA or the best ISA."""
    import torch

    from tandem.kernels.formats import PackedMatrix, find_format
    from tandem.kernels.formats.packed import write_weight

    weights = torch.randn(128, 512).bfloat16()
    for name in ("int4-g32", "int8-g128"):
        packed = PackedMatrix.empty(128, 512, find_format(name))
        yield f"quantise {name}", partial(write_weight, packed.blocks, packed.format, weights)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        _child(*sys.argv[2:])
    else:
        main()
