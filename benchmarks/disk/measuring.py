"""Times a model's decode steps and prompts, with their misses and the disk's reads."""

import resource
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from benchmarks.disk.bound import Costs, LruSlots, step_bound
from benchmarks.disk.device import DeviceBytes, DiskProbe
from benchmarks.disk.job import Job
from benchmarks.disk.model import NotedRouting, RunningModel
from benchmarks.policy.routings import Ints, made

from tandem.experts.cache.host_slots import HostSlots
from tandem.hf.runtime import require_runtime
from tandem.recording.recorded_graph import RecordedGraph
from tandem.trace import RoutingTrace

_PROBE_EVERY = 2  # steps; each time another depth
_RESIDENT_STEPS = 24  # of the same token again and again, whose experts are all in memory
_PROFILE_RUNS = 10
_PROMPTS = 3
_BETWEEN_STEPS = 16  # of decoding, between two prompts


@dataclass(slots=True)
class Sample:
    """The time and the counts of one decode step or prompt."""

    seconds: float
    device_bytes: int
    read_bytes: int
    waited_seconds: float
    misses: int
    absent: list[int]
    """By layer: the number of used experts that were not in memory."""
    chosen: list[int]
    lru_misses: int
    major_faults: int


@dataclass(slots=True)
class Watch:
    """The counters that are read before and after each step."""

    device: DeviceBytes
    slots: HostSlots | None
    trace: Ints | None
    """(tokens, layers, top_k)"""
    routing: NotedRouting | None
    lru: list[LruSlots] = field(default_factory=list)

    def time(self, work: Callable[[], None], num_tokens: int) -> Sample:
        """Time some work of this many tokens."""
        used = self._used(num_tokens)
        absent = self._absent(used)
        lru = 0
        for layer, one in enumerate(self.lru):
            lru += sum(one.use(map(int, token[layer])) for token in self._tokens(num_tokens))
        faults, device, counts = _major_faults(), self.device.read(), self._counts()
        begin = time.perf_counter()
        work()
        seconds = time.perf_counter() - begin
        after = self._counts()
        return Sample(
            seconds, self.device.read() - device,
            after.read_bytes - counts.read_bytes, after.waited_seconds - counts.waited_seconds,
            after.misses - counts.misses, absent, list(map(len, used)), lru,
            _major_faults() - faults,
        )  # fmt: skip

    def _counts(self) -> Any:
        return _NOTHING if self.slots is None else self.slots.statistics()

    def _tokens(self, num_tokens: int) -> Ints:
        assert self.trace is not None
        assert self.routing is not None
        at = np.arange(self.routing.at, self.routing.at + num_tokens) % len(self.trace)
        return self.trace[at]

    def _used(self, num_tokens: int) -> list[set[int]]:
        if self.trace is None:
            return []
        tokens = self._tokens(num_tokens)
        return [set(tokens[:, layer].ravel().tolist()) for layer in range(tokens.shape[1])]

    def _absent(self, used: list[set[int]]) -> list[int]:
        if self.slots is None:
            return []
        native = self.slots.native
        return [len(one.difference(native.resident(i))) for i, one in enumerate(used)]


@dataclass(frozen=True, slots=True)
class _Counts:
    read_bytes: int = 0
    waited_seconds: float = 0.0
    misses: int = 0


_NOTHING = _Counts()


def _major_faults() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_majflt


def planned_trace(trace: RoutingTrace, job: Job) -> tuple[RoutingTrace, int]:
    """Return the tokens in the order of use, and the index from which one token repeats."""
    first = job.cold_prompt + job.warm_up + job.steps
    experts = trace.experts.astype(np.int64)
    again = np.repeat(experts[first : first + 1], _RESIDENT_STEPS + 1, axis=0)
    planned = np.concatenate([experts[:first], again, experts[first + 1 :]])
    return (
        made(trace.meta.model, planned, trace.meta.n_experts, np.array([len(planned)])),
        first,
    )


def measure_decoding(
    running: RunningModel, watch: Watch, probe: DiskProbe, job: Job
) -> list[Sample]:
    """Return the samples of steps after the warm-up; the disk is probed between them."""
    for _ in range(job.warm_up):
        watch.time(running.step, 1)
    samples = []
    for number in range(job.steps):
        if number % _PROBE_EVERY == 0:
            probe.measure()
        samples.append(watch.time(running.step, 1))
    while not all(probe.rates.values()):  # too few steps for each depth
        probe.measure()
    return samples


def resident_costs(running: RunningModel, watch: Watch, top_k: int) -> tuple[float, float]:
    """Return the seconds of a step's dense parts and of one expert, from steps without a miss."""
    running.step()
    samples = [watch.time(running.step, 1) for _ in range(_RESIDENT_STEPS)]
    seconds = [sample.seconds for sample in samples if not sample.misses]
    step = running.pool.step
    recording = None if step is None else step.recording
    if not isinstance(recording, RecordedGraph):
        raise SystemExit("the decode steps of this model are not recorded: no costs of their parts")
    profile = recording.profile(_PROFILE_RUNS)
    experts = sum(s for operation, s in profile if operation.name == "experts")
    share = experts / sum(s for _, s in profile)
    if not seconds:
        raise SystemExit("no step without a miss: no costs of its parts")
    whole = statistics.median(seconds)
    return whole * (1 - share), whole * share / (top_k * len(samples[0].chosen))


def measure_prompts(running: RunningModel, watch: Watch, job: Job) -> list[Sample]:
    """Return the samples of prompts, with decode steps between them, as in a conversation."""
    samples = []
    for _ in range(_PROMPTS):
        samples.append(watch.time(lambda: running.prompt(job.prompt), job.prompt))
        for _ in range(_BETWEEN_STEPS):
            watch.time(running.step, 1)
    return samples


def watch_of(
    running: RunningModel, trace: RoutingTrace | None, folder: Path, accuracy: float | None = None
) -> Watch:
    """Force a trace's routing onto a model, and return a watch for its steps."""
    routing = None if trace is None else running.force(trace, accuracy)
    slots = require_runtime(running.model).host_slots
    has_lru = slots is not None and trace is not None
    lru = [LruSlots(n) for n in slots.num_slots] if slots is not None and has_lru else []
    experts = None if trace is None else trace.experts.astype(np.int64)
    return Watch(DeviceBytes(folder), slots, experts, routing, lru)


def decode_report(samples: list[Sample], costs: Costs | None) -> dict[str, Any]:
    """Return medians and sums of the decode steps."""
    seconds = [s.seconds for s in samples]
    uses = sum(sum(s.chosen) for s in samples)
    report: dict[str, Any] = {
        "ms": 1e3 * statistics.median(seconds),
        "mean_ms": 1e3 * statistics.mean(seconds),
        "device_mb": sum(s.device_bytes for s in samples) / len(samples) / 1e6,
        "major_faults": sum(s.major_faults for s in samples) / len(samples),
    }
    if costs is None or not uses:
        return report
    bounds = [step_bound(s.absent, s.chosen, costs) for s in samples]
    read = sum(s.read_bytes for s in samples)
    return report | {
        "hit_rate": 1 - sum(s.misses for s in samples) / uses,
        "absent_rate": sum(sum(s.absent) for s in samples) / uses,
        "lru_hit_rate": 1 - sum(s.lru_misses for s in samples) / uses,
        "read_mb": read / len(samples) / 1e6,
        "device_over_requested": sum(s.device_bytes for s in samples) / max(1, read),
        "waited_ms": 1e3 * statistics.mean(s.waited_seconds for s in samples),
        "bound_ms": 1e3 * statistics.mean(bounds),
        "over_bound": statistics.median(s / b for s, b in zip(seconds, bounds, strict=True)),
        "sum_over_bound": sum(seconds) / sum(bounds),
        "dense_ms": 1e3 * costs.dense_seconds,
        "expert_us": 1e6 * costs.expert_seconds,
    }
