"""Do torch's threads and ours get in each other's way? A model's layer runs one after the other.

    python -m benchmarks.kernels.alternation

Times a torch operation and an expert call, each alone, then in turn (48 times, as in 48 layers),
and prints how much slower each became; the goal is 5 % at most. The waits between them are those of
a model: none.
"""

import os

os.environ.setdefault("GOMP_SPINCOUNT", "1000")  # as the command `tandem` sets it

import itertools
import statistics
import time
from collections.abc import Callable

import torch

from tandem.kernels.cpu import detect_cpu
from tandem.kernels.formats.expert import ExpertLayout
from tandem.kernels.formats.weight_format import find_format
from tandem.kernels.memory import allocate_buffers
from tandem.kernels.native import ActivationKind, NativeActivation, NativeExperts

LAYERS = 48
ROUNDS = 15
TOP_K = 8
HIDDEN, INNER, NUM_EXPERTS = 2048, 768, 64


def main() -> None:
    """Measure and print."""
    threads = detect_cpu().num_threads
    torch.set_num_threads(threads)
    operation, experts = torch_operation(), expert_call(threads)
    alone: dict[str, list[float]] = {"torch": [], "experts": []}
    in_turn: dict[str, list[float]] = {"torch": [], "experts": []}
    for _ in range(ROUNDS):
        alone["torch"].append(median_seconds(operation))
        alone["experts"].append(median_seconds(experts))
        pairs = [(timed(operation), timed(experts)) for _ in range(LAYERS)]
        in_turn["torch"].append(statistics.median(pair[0] for pair in pairs))
        in_turn["experts"].append(statistics.median(pair[1] for pair in pairs))
    for name in alone:
        before, after = statistics.median(alone[name]), statistics.median(in_turn[name])
        print(f"{name:8} alone {before * 1e6:6.0f} us, in turn {after * 1e6:6.0f} us, "
              f"{(after / before - 1) * 100:+.1f} %")  # fmt: skip


def torch_operation() -> Callable[[], object]:
    """Return a product of attention's size: 4,096 x 2,048 in bf16, one token, weights cold."""
    weights = torch.randn(8, 4096, HIDDEN).bfloat16()
    x = torch.randn(1, HIDDEN, dtype=torch.bfloat16)
    numbers = itertools.cycle(range(len(weights)))
    return lambda: torch.nn.functional.linear(x, weights[next(numbers)])


def expert_call(threads: int) -> Callable[[], object]:
    """Return a call of eight int4 experts with one token; each call takes the next experts."""
    layout = ExpertLayout(find_format("int4-g128"), HIDDEN, INNER, is_gated=True, has_bias=False)
    store = allocate_buffers(NUM_EXPERTS, layout.num_bytes)
    engine = NativeExperts(num_threads=threads)
    activation, x = NativeActivation(ActivationKind.SWIGLU), torch.randn(1, HIDDEN)
    begin = torch.arange(TOP_K + 1, dtype=torch.int32)
    token = torch.zeros(TOP_K, dtype=torch.int32)
    first = 0

    def call() -> object:
        nonlocal first
        first = (first + TOP_K) % NUM_EXPERTS
        chosen = torch.arange(first, first + TOP_K)
        return engine.compute(layout, store, activation, x, chosen, begin, token)

    return call


def timed(work: Callable[[], object]) -> float:
    """Return the seconds of one call."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def median_seconds(work: Callable[[], object]) -> float:
    """Return the median of as many calls as a model has layers."""
    return statistics.median(timed(work) for _ in range(LAYERS))


if __name__ == "__main__":
    main()
