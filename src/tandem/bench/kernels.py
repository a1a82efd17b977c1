"""Times the native expert kernels against what this machine can do, both in turn.

The ceilings drift on shared machines, so each case is measured between two measurements of them:
bytes read per second with the same threads, int8 and bf16 multiplications per second. Weights are
random and cold: each call takes the next experts of a store that is larger than the caches.
"""

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from tandem.core.errors import ConfigError
from tandem.core.registry import nearest_names
from tandem.kernels.formats.expert import ExpertLayout
from tandem.kernels.formats.weight_format import find_format
from tandem.kernels.native import (
    ActivationKind,
    NativeActivation,
    NativeExperts,
    allocate_buffers,
    is_supported,
)

# (hidden size, intermediate size) of one expert.
SHAPES = {
    "qwen3-30b-a3b": (2048, 768),
    "mixtral-8x7b": (4096, 14336),
    "deepseek-v2-lite": (2048, 1408),
    "gpt-oss-20b": (2880, 2880),
    "olmoe": (2048, 1024),
}
FORMATS = ("bf16", "int8", "int4-g128", "int4-g32", "mxfp4")
TOKENS = (1, 2, 4, 8, 64, 256)

_CEILING_BYTES = 1 << 29
_MULTIPLY_COUNT = 2_000_000
_STORE_BYTES = 1_200_000_000
_CASE_SECONDS = 0.6
_MIN_CALLS, _MAX_CALLS = 5, 200
_SCALE = 0.01  # of the random weights; nothing overflows, nothing becomes subnormal


@dataclass(frozen=True, slots=True)
class Ceiling:
    """What the machine does at best with the same threads."""

    read_gigabytes_per_second: float
    int8_gops: float
    bf16_gflops: float


@dataclass(frozen=True, slots=True)
class Case:
    """One measured case: medians over calls; `share_of_ceiling` of the bound that is nearer."""

    shape: str
    format: str
    tokens: int
    microseconds: float
    gigabytes_per_second: float
    gops: float
    share_of_ceiling: float
    bound: str
    """"memory" or "arithmetic": which of the two ceilings the share is of."""


class KernelBench:
    """Measures ceilings and cases with one set of threads."""

    def __init__(self, *, num_threads: int, isa: str = "") -> None:
        """Start the threads; `isa` forces an instruction set."""
        self.experts = NativeExperts(num_threads=num_threads, isa=isa)
        self._memory = allocate_buffers(1, _CEILING_BYTES).fill_(1)

    def ceiling(self) -> Ceiling:
        """Measure the ceilings once; takes about 50 ms."""
        engine = self.experts
        return Ceiling(
            _rate(lambda: engine.read_all(self._memory)),
            _rate(lambda: engine.multiply(is_int8=True, count_per_thread=_MULTIPLY_COUNT)),
            _rate(lambda: engine.multiply(is_int8=False, count_per_thread=_MULTIPLY_COUNT // 4)),
        )

    def cases(self, shape: str, format_name: str, num_active: int = 8) -> Iterator[Case]:
        """Measure one format of a shape for 1 to 256 tokens per expert."""
        layout = _layout(shape, format_name)
        store = _random_store(layout)
        for tokens in TOKENS:
            yield self._case(shape, layout, store, tokens, min(num_active, len(store)))

    def _case(
        self, shape: str, layout: ExpertLayout, store: Tensor, tokens: int, num_active: int
    ) -> Case:
        hidden = torch.randn(tokens, layout.hidden_size)
        begin = torch.arange(0, tokens * num_active + 1, tokens, dtype=torch.int32)
        token = torch.arange(tokens, dtype=torch.int32).repeat(num_active)
        activation = NativeActivation(ActivationKind.SWIGLU)
        seconds: list[float] = []
        ceilings = [self.ceiling()]
        while not _is_enough(seconds):
            first = len(seconds) * num_active
            chosen = (torch.arange(num_active) + first) % len(store)
            start = time.perf_counter()
            self.experts.compute(layout, store, activation, hidden, chosen, begin, token)
            seconds.append(time.perf_counter() - start)
            if len(seconds) % 20 == 0:
                ceilings.append(self.ceiling())
        ceilings.append(self.ceiling())
        median = statistics.median(seconds)
        operations = 6 * layout.hidden_size * layout.intermediate_size * tokens * num_active
        return _judge(
            shape, layout, tokens, median, num_active * layout.num_bytes, operations, ceilings
        )


def _judge(
    shape: str,
    layout: ExpertLayout,
    tokens: int,
    seconds: float,
    num_bytes: int,
    operations: int,
    ceilings: list[Ceiling],
) -> Case:
    read = statistics.median(c.read_gigabytes_per_second for c in ceilings)
    is_bf16 = layout.format.kind == "bf16"
    peak = statistics.median(c.bf16_gflops if is_bf16 else c.int8_gops for c in ceilings)
    gigabytes, gops = num_bytes / seconds / 1e9, operations / seconds / 1e9
    shares = {"memory": gigabytes / read, "arithmetic": gops / peak}
    bound = max(shares, key=lambda name: shares[name])
    return Case(
        shape, layout.format.name, tokens, seconds * 1e6, gigabytes, gops, shares[bound], bound
    )


def machine(bench: KernelBench) -> dict[str, object]:
    """Return the machine's part of the report: median ceilings, threads, instruction set."""
    samples = [bench.ceiling() for _ in range(5)]
    medians = {
        name: statistics.median(asdict(sample)[name] for sample in samples)
        for name in asdict(samples[0])
    }
    return {**medians, "threads": bench.experts.num_threads, "isa": bench.experts.isa}


def _layout(shape: str, format_name: str) -> ExpertLayout:
    if shape not in SHAPES:
        raise ConfigError(f"unknown shape {shape!r}; {nearest_names(shape, list(SHAPES))}")
    hidden, inner = SHAPES[shape]
    layout = ExpertLayout(find_format(format_name), hidden, inner, is_gated=True, has_bias=False)
    if not is_supported(layout):
        raise ConfigError(f"there are no native kernels for {format_name!r} yet")
    return layout


def _random_store(layout: ExpertLayout) -> Tensor:
    """Fill buffers with random codes and one fixed scale: the bits do not change the speed."""
    num_experts = max(8, _STORE_BYTES // layout.num_bytes)
    store = allocate_buffers(num_experts, layout.num_bytes)
    one = store[0]
    if layout.format.kind == "bf16":
        one.view(torch.bfloat16).normal_(std=_SCALE)
    else:
        one.random_(0, 256)
        for section in (layout.up_scales, layout.down_scales):
            scales = section.of(one)
            if layout.format.kind == "mxfp4":
                scales.fill_(120)  # 2^-7
            else:
                scales.view(torch.float16).fill_(_SCALE)
    store[1:] = one
    return store


def _is_enough(seconds: list[float]) -> bool:
    if len(seconds) < _MIN_CALLS:
        return False
    return len(seconds) >= _MAX_CALLS or sum(seconds) > _CASE_SECONDS


def _rate(work: Callable[[], int]) -> float:
    """Return the work per nanosecond (billions per second) of one call."""
    start = time.perf_counter()
    done = work()
    return done / (time.perf_counter() - start) / 1e9
