"""Times the expert kernels against this machine's ceilings, and in turns with other systems.

The ceilings are bytes read per second with the same threads, and int8 and bf16 multiplications per
second. They drift on shared machines, so every round of a case measures them again. Weights are
random and cold: each call computes the next experts of a store that is larger than the caches.
"""

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Protocol

import torch

from tandem.bench.random_weights import random_experts
from tandem.core.errors import ConfigError
from tandem.core.registry import nearest_names
from tandem.kernels import _native
from tandem.kernels.engine import start_engine
from tandem.kernels.formats.expert import ExpertLayout
from tandem.kernels.formats.weight_format import WeightFormat, find_format
from tandem.kernels.memory import allocate_buffers
from tandem.kernels.native import ActivationKind, NativeActivation, compute_experts

# (hidden size, intermediate size) of one expert. Nemotron's experts are missing because they have
# no gate.
SHAPES = {
    "qwen3-30b-a3b": (2048, 768),
    "mixtral-8x7b": (4096, 14336),
    "deepseek-v2-lite": (2048, 1408),
    "gpt-oss-20b": (2880, 2880),
    "olmoe": (2048, 1024),
    "qwen3.6-35b-a3b": (2048, 512),
    "qwen3-next-80b-a3b": (2048, 512),
    "gemma4-26b-a4b": (2816, 704),
    "lfm2-8b-a1b": (2048, 1792),
    "glm-4.7-flash": (2048, 1536),
}
FORMATS = ("bf16", "int8", "int4", "mxfp4")
TOKENS = (1, 4, 128, 512)

_NUM_ACTIVE = 8  # active experts per call
_CEILING_BYTES = 1 << 29
_SAMPLE_BYTES = 1 << 27
_MULTIPLY_COUNTS = {4: 2_000_000, 8: 2_000_000, 16: 500_000}  # by bits of a code
_STORE_BYTES = 500_000_000  # several times one socket's share of the largest last-level caches
_ROUNDS = 5
_ROUND_SECONDS = 0.12
_MIN_CALLS, _MAX_CALLS = 2, 40


@dataclass(frozen=True, slots=True)
class Ceiling:
    """The best rates that the machine reaches with the threads of the kernels."""

    read_gigabytes_per_second: float
    int4_gops: float
    """Speed of products of int8 with codes of fewer than 8 bits. On a processor without VNNI it is
    twice `int8_gops`."""
    int8_gops: float
    bf16_gflops: float

    def peak_of(self, fmt: WeightFormat | None) -> float:
        """Return the ceiling for a format, in operations per nanosecond; None: plain weights."""
        if fmt is None or fmt.kind in ("bf16", "fp16", "fp8"):
            return self.bf16_gflops
        return self.int8_gops if fmt.bits == 8 else self.int4_gops


@dataclass(frozen=True, slots=True)
class Work:
    """Gated experts of one shape; each call sends every token to the next `num_active` experts."""

    hidden_size: int
    intermediate_size: int
    format: str
    """Tandem's name of the format; another system runs its own nearest format."""
    num_active: int
    num_threads: int
    store_bytes: int
    """The approximate bytes of weights to allocate. They are so many that each call reads experts
    from memory, not from a cache."""
    max_tokens: int

    def num_experts(self, bits_per_weight: float) -> int:
        """Return the number of experts in the store: a multiple of `num_active`."""
        one = 3 * self.hidden_size * self.intermediate_size * bits_per_weight / 8
        calls = max(2, round(self.store_bytes / one / self.num_active))
        return calls * self.num_active


@dataclass(frozen=True, slots=True)
class Case:
    """One measured case: medians over calls; `share_of_ceiling` refers to the ceiling `bound`."""

    shape: str
    format: str
    tokens: int
    microseconds: float
    gigabytes_per_second: float
    gops: float
    share_of_ceiling: float
    bound: str
    """The ceiling that the share refers to: "memory" or "arithmetic"."""
    peer: str | None = None
    """The other system that was timed; None for Tandem."""
    peer_format: str | None = None
    """The peer's name of the format that it ran."""
    ratio: float | None = None
    """Tandem's speed divided by the peer's."""


class Timed(Protocol):
    """A system under test, Tandem or another, with its weights in memory."""

    bytes_per_call: int
    format: str

    def time_calls(self, tokens: int, num_calls: int) -> list[float]:
        """Return the seconds of each of `num_calls` calls; each call computes the next experts."""
        ...


class KernelBench:
    """Measures ceilings and cases with one set of threads."""

    def __init__(self, *, num_threads: int, isa: str = "", store_bytes: int = _STORE_BYTES) -> None:
        """Start the threads; `isa` forces an instruction set."""
        self.engine = start_engine(num_threads=num_threads, isa=isa)
        self.failures: dict[str, str] = {}
        """The reasons why peers have no results; a key is a peer's name and Tandem's format."""
        self._memory = allocate_buffers(1, _CEILING_BYTES).fill_(1)
        self._store_bytes = store_bytes
        self._sample_begin = 0

    def ceiling(self) -> Ceiling:
        """Measure each ceiling once, in about 50 ms altogether."""
        return Ceiling(
            _rate(lambda: self.engine.read_all(self._memory)),
            *(_rate(partial(self.engine.multiply, b, n)) for b, n in _MULTIPLY_COUNTS.items()),
        )

    def read_rate(self) -> float:
        """Return the present read rate in bytes per nanosecond; takes a few milliseconds.

        Each call reads another part of the memory, because a large cache may still contain the part
        that was read last.
        """
        begin, self._sample_begin = self._sample_begin, self._sample_begin + _SAMPLE_BYTES
        self._sample_begin %= _CEILING_BYTES
        sample = self._memory[:, begin : begin + _SAMPLE_BYTES]
        return _rate(lambda: self.engine.read_all(sample))

    def work(self, shape: str, format_name: str, tokens: Sequence[int]) -> Work:
        """Return the work for one format and shape, which a peer must compute as well."""
        layout = _layout(shape, format_name)
        return Work(
            layout.hidden_size, layout.intermediate_size, layout.format_name, _NUM_ACTIVE,
            self.engine.num_threads, self._store_bytes, max(tokens),
        )  # fmt: skip

    def cases(
        self,
        shape: str,
        format_name: str,
        tokens: Sequence[int],
        peers: Mapping[str, Timed] | None = None,
    ) -> Iterator[Case]:
        """Measure one format of a shape; yield a case for each number of tokens and each system.

        Tandem is the first system for each number of tokens; `peers` follow.
        """
        layout, work = _layout(shape, format_name), self.work(shape, format_name, tokens)
        timed: dict[str | None, Timed] = {None: _Own(self.engine, layout, work)}
        timed.update(peers or {})
        for count in tokens:
            yield from self._compare(shape, layout, count, timed)

    def _compare(
        self, shape: str, layout: ExpertLayout, tokens: int, timed: dict[str | None, Timed]
    ) -> Iterator[Case]:
        """Time all systems in turns, in several rounds; yield a case for each system.

        Each round also measures the ceilings. A system that raises `OSError` has no case, but an
        entry in `failures`.
        """
        seconds: dict[str | None, list[float]] = {name: [] for name in timed}
        num_calls: dict[str | None, int] = {}
        ceilings = [self.ceiling()]
        for _ in range(_ROUNDS):
            for name in list(timed):
                try:
                    if name not in num_calls:
                        probe = statistics.median(timed[name].time_calls(tokens, 2))
                        num_fitting = int(_ROUND_SECONDS / probe)
                        num_calls[name] = min(max(num_fitting, _MIN_CALLS), _MAX_CALLS)
                    seconds[name] += timed[name].time_calls(tokens, num_calls[name])
                except OSError as error:
                    self.failures[f"{name}, {layout.format_name}"] = str(error)
                    del timed[name], seconds[name]
            ceilings.append(self.ceiling())
        own = statistics.median(seconds[None])
        for name, taken in seconds.items():
            yield _judge(
                shape, layout, tokens, statistics.median(taken), timed[name], ceilings, name, own
            )


class _Own:
    """The `Timed` system that is Tandem: its kernels, with their own store of random experts."""

    def __init__(self, engine: _native.ExpertEngine, layout: ExpertLayout, work: Work) -> None:
        self._engine, self._layout, self._work = engine, layout, work
        self._store = random_experts(layout, work.num_experts(layout.format.bits_per_weight))
        self._call = 0
        self.bytes_per_call = work.num_active * layout.num_bytes
        self.format = layout.format_name

    def time_calls(self, tokens: int, num_calls: int) -> list[float]:
        """Return the seconds of each of `num_calls` calls, after one untimed call."""
        active = self._work.num_active
        hidden = torch.randn(tokens, self._layout.hidden_size, device="cpu")
        begin = torch.arange(0, tokens * active + 1, tokens, dtype=torch.int32, device="cpu")
        token = torch.arange(tokens, dtype=torch.int32, device="cpu").repeat(active)
        activation = NativeActivation(ActivationKind.SWIGLU)
        # Allocated once, as an executor does.
        out = torch.empty(tokens * active, self._layout.hidden_size, device="cpu")
        seconds = []
        for _ in range(num_calls + 1):
            chosen = (torch.arange(active, device="cpu") + self._call * active) % len(self._store)
            start = time.perf_counter()
            addresses = chosen * self._layout.num_bytes + self._store.data_ptr()
            compute_experts(
                self._engine, self._layout, addresses, activation, hidden, begin, token, out
            )
            seconds.append(time.perf_counter() - start)
            self._call += 1
        return seconds[1:]


def _judge(
    shape: str,
    layout: ExpertLayout,
    tokens: int,
    seconds: float,
    timed: Timed,
    ceilings: list[Ceiling],
    peer: str | None,
    own_seconds: float,
) -> Case:
    read = statistics.median(c.read_gigabytes_per_second for c in ceilings)
    peak = statistics.median(ceiling.peak_of(layout.format) for ceiling in ceilings)
    operations = 6 * layout.hidden_size * layout.intermediate_size * tokens * _NUM_ACTIVE
    gigabytes, gops = timed.bytes_per_call / seconds / 1e9, operations / seconds / 1e9
    shares = {"memory": gigabytes / read, "arithmetic": gops / peak}
    bound = max(shares, key=lambda name: shares[name])
    case = Case(
        shape, layout.format_name, tokens, seconds * 1e6, gigabytes, gops, shares[bound], bound
    )
    if peer is None:
        return case
    return Case(
        **{
            **asdict(case),
            "peer": peer,
            "peer_format": timed.format,
            "ratio": seconds / own_seconds,
        }
    )


def machine(bench: KernelBench) -> dict[str, object]:
    """Return the report's entries on the machine: median ceilings, threads, instruction set."""
    samples = [bench.ceiling() for _ in range(5)]
    medians = {
        name: statistics.median(asdict(sample)[name] for sample in samples)
        for name in asdict(samples[0])
    }
    return {**medians, "threads": bench.engine.num_threads, "isa": bench.engine.isa}


def _layout(shape: str, format_name: str) -> ExpertLayout:
    if shape not in SHAPES:
        raise ConfigError(f"unknown shape {shape!r}; {nearest_names(shape, list(SHAPES))}")
    hidden, inner = SHAPES[shape]
    layout = ExpertLayout(find_format(format_name), hidden, inner, is_gated=True, has_bias=False)
    return layout


def _rate(work: Callable[[], int]) -> float:
    """Call `work` once; return the amount that it reports, divided by its time in nanoseconds."""
    start = time.perf_counter()
    done = work()
    return done / (time.perf_counter() - start) / 1e9
