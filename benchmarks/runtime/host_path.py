"""What the host does around a layer on a GPU, without one: python -m benchmarks.runtime.host_path

Real routing through the hybrid executor on device `cuda`, at batch 1 and a share of the experts
resident. The twin of the GPU does its host's part (row tables, staging, copies to pinned memory)
and launches nothing; the CPU's experts are so small that they take no time. Two spans, as medians:

    choice known -> CPU at work             until then the CPU waits
    CPU done     -> next layer may run      until then the GPU waits

What a replayed step leaves to the time behind the next replay's launch is said beside them.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable
from statistics import median
from typing import Any, NamedTuple

import torch
from benchmarks.runtime.overhead import (
    fill,
    make_store,
    replay_seconds,
    trace_and_machine,
    virtual_cache,
)

from tandem.devices.cuda.device import CudaDevice
from tandem.devices.cuda.kernels import Prepared, TritonKernels
from tandem.devices.cuda.streams import Stream, Work
from tandem.experts.cache.expert_cache import Machine
from tandem.experts.execution.expert_kernels import ExpertKernels, StartedWork
from tandem.experts.execution.hybrid_executor import HybridExecutor
from tandem.kernels.dense import CpuThreads
from tandem.policy.plan import Geometry

HIDDEN, INNER = 2048, 32  # rows as wide as Qwen3-30B-A3B's


class _Event:
    """A place in a queue that is always empty."""

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass


class _Streams:
    """Does at once what is queued; see `tandem.devices.cuda.streams.Streams`."""

    name = "twin"
    device = torch.device("cpu")
    event = _Event()

    def run(self, stream: Stream, work: Work) -> None:
        work()

    def record(self, stream: Stream, *, is_timed: bool = False) -> _Event:
        return self.event

    def between(self, first: _Event, last: _Event) -> float:
        return 0.0

    def wait(self, stream: Stream, event: _Event) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def limit(self, num_bytes: int | None) -> None:
        pass

    def empty(self, num_bytes: int) -> torch.Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8)

    pinned = empty


class _Kernels(TritonKernels):
    """Prepares batches and launches none."""

    def __init__(self) -> None:
        self._sums = torch.zeros(1, HIDDEN)

    def prepare(self, batch: Any, use: Any) -> Prepared:
        return super().prepare(batch, use)._replace(launch=lambda table: None)

    def add_rows(self, rows: Any, row_of: Any, weights: Any, out: torch.Tensor) -> None:
        out.zero_()


class Spans:
    """When what happened in layers of which the CPU had a share; seconds of each."""

    def __init__(self, hybrid: HybridExecutor, kernels: ExpertKernels) -> None:
        """Watch an executor and what computes its CPU share."""
        self.before: list[float] = []
        self.after: list[float] = []
        self.later: list[float] = []
        self._known = self._done = 0.0
        self._watch(hybrid.device, "download", self._note_choice)
        self._watch(kernels, "start", self._note_start)
        self._watch(hybrid, "catch_up", self._note_later)
        self._watch(hybrid, "execute", self._note_end)

    def _watch(self, owner: Any, name: str, then: Callable[[Any, float], Any]) -> None:
        inner = getattr(owner, name)

        def watched(*args: Any) -> Any:
            begin = time.perf_counter()
            return then(inner(*args), begin)

        setattr(owner, name, watched)

    def _note_choice(self, tensors: Any, _: float) -> Any:
        if len(tensors) == 2:  # else it is the gate weights
            self._known = time.perf_counter()
        return tensors

    def _note_start(self, work: StartedWork, _: float) -> Any:
        self.before.append(time.perf_counter() - self._known)
        return _Watched(work, self)

    def note_done(self) -> None:
        """Note that the CPU's share is computed."""
        self._done = time.perf_counter()

    def _note_end(self, out: torch.Tensor, _: float) -> torch.Tensor:
        if self._done:
            self.after.append(time.perf_counter() - self._done)
        self._done = 0.0
        return out

    def _note_later(self, _: None, begin: float) -> None:
        self.later.append(time.perf_counter() - begin)


class _Watched(NamedTuple):
    work: StartedWork
    spans: Spans

    def finish(self) -> None:
        self.work.finish()
        self.spans.note_done()


def make_hybrid(
    geometry: Geometry, machine: Machine, share: float
) -> tuple[HybridExecutor, ExpertKernels]:
    """Return an executor on the twin, with a share of the experts resident."""
    kernels = ExpertKernels(CpuThreads(num_threads=2))
    streams: Any = _Streams()
    device = CudaDevice(streams, _Kernels())
    cache = virtual_cache(make_store(geometry, HIDDEN, INNER, "int4"), device, geometry, machine)
    fill(cache, share)
    return HybridExecutor(cache, device, kernels), kernels


def main() -> int:
    """Measure, print a table and one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=100)
    flags = parser.parse_args()
    torch.set_num_threads(1)
    trace, machine = trace_and_machine()
    report = {}
    for share in (0.25, 0.5):
        hybrid, kernels = make_hybrid(trace.meta.geometry, machine, share)
        replay_seconds(hybrid, trace, flags.steps, HIDDEN)  # cache and policies' tables fill
        spans = Spans(hybrid, kernels)
        with hybrid.deferring():
            replay_seconds(hybrid, trace, flags.steps, HIDDEN)
        report[f"{share:.0%} resident"] = {
            "choice_known_to_cpu_at_work": median(spans.before) * 1e6,
            "cpu_done_to_next_layer": median(spans.after) * 1e6,
            "left_to_later": median(spans.later) * 1e6,
        }
    for title, values in report.items():
        print(title, ", ".join(f"{key} {value:.1f} us" for key, value in values.items()))
    print(json.dumps(report))
    return 0


if __name__ == "__main__":
    sys.exit(main())
