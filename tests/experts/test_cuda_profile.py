"""Tests of measuring a GPU: experts that are not in a processor's cache, and host work."""

import dataclasses
import time
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from tandem.devices.cuda.device import CudaDevice
from tandem.devices.cuda.hand_over_trial import TrialLimits, graph_costs
from tandem.devices.cuda.kernels import Prepared, TorchKernels
from tandem.devices.cuda.profile import measure_device
from tandem.devices.cuda.streams import Stream, Work
from tandem.experts.execution.batch import ExpertBatch
from tandem.experts.execution.expert_kernels import ExpertKernels, WeightSource
from tandem.experts.measuring.profiler import MeasuredExperts
from tandem.experts.store.host_store import HostStore
from tandem.kernels.dense import CpuThreads
from tandem.policy.cost import FETCHES_A_LAUNCH, HardwareProfile, HostCosts
from tests.experts.lazy_streams import LazyStreams
from tests.experts.machines import FUNCTIONS, GEOMETRY, HIDDEN, make_machine
from tests.experts.test_handed_layers import HostSignals, NeverRings
from tests.kernels.interpreter import interpreted

CACHE_BYTES = 100_000
PREPARING_SECONDS, SENDING_SECONDS = 3.0, 0.5


class Clock:
    """A clock that this file advances, plus a little at each reading."""

    now = 0.0

    def __call__(self) -> float:
        self.now += 1e-6
        return self.now


class Noting(TorchKernels):
    """Records which experts' memory it reads; preparing a batch takes host time."""

    def __init__(self, clock: Clock) -> None:
        self.read: list[int] = []
        self._clock = clock

    def prepare(self, batch: ExpertBatch, use: WeightSource) -> Prepared:
        self._clock.now += PREPARING_SECONDS
        self.read += [image.data_ptr() for image in use.images()]
        return super().prepare(batch, use)


class SlowUploads(CudaDevice):
    """A GPU to which uploads of host tokens are slow."""

    clock: Clock

    def upload(self, source: Tensor, target: Tensor) -> None:
        self.clock.now += SENDING_SECONDS
        super().upload(source, target)


class Streams(LazyStreams):
    """Streams whose copies take a hundredth of a launch's host time."""

    def seconds(self, stream: Stream, work: Work) -> float:
        super().seconds(stream, work)
        return PREPARING_SECONDS / 100 if stream is Stream.FETCH else 1e-3


def measured(
    store: HostStore,
    monkeypatch: pytest.MonkeyPatch,
    kernels: Noting,
    clock: Clock,
    graph: Callable[[float], HostCosts] | None = None,
) -> tuple[HardwareProfile, HardwareProfile]:
    """Return a profile before and after measuring the GPU."""
    streams = Streams(is_eager=True)
    streams.l2_bytes = CACHE_BYTES
    device = SlowUploads(streams, kernels)
    device.clock = clock
    monkeypatch.setattr(time, "perf_counter", clock)
    before = make_machine(cpu=1e-3, gpu=1e-3, link=1e-3, dense=1e-3).profile
    after = measure_device(
        before,
        device,
        MeasuredExperts(
            store=store,
            geometry=GEOMETRY,
            functions=FUNCTIONS,
            kernels=ExpertKernels(CpuThreads(num_threads=1)),
            dtype=torch.float32,
            hidden_size=HIDDEN,
        ),
        graph,
    )
    return before, after


def bytes_between_uses(read: Sequence[int], image_bytes: int) -> int:
    """Return the minimum number of bytes read between two uses of the same expert's memory."""
    last: dict[int, int] = {}
    least = len(read)
    for place, address in enumerate(read):
        if address in last:
            least = min(least, len(set(read[last[address] : place])))
        last[address] = place
    return least * image_bytes


def test_more_than_four_caches_lie_between_two_uses_of_an_expert(
    store: HostStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernels = Noting(clock := Clock())
    measured(store, monkeypatch, kernels, clock)
    assert len(set(kernels.read)) < len(kernels.read)
    assert bytes_between_uses(kernels.read, store[0].image_bytes) > 4 * CACHE_BYTES


def test_the_hosts_work_is_measured_and_charged_to_layers_fetches_and_cpu_experts(
    store: HostStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, after = measured(store, monkeypatch, Noting(clock := Clock()), clock)
    (was,), (alone,), (host,) = before.shapes, after.shapes, after.host
    assert host.layer_seconds == pytest.approx(PREPARING_SECONDS, rel=1e-3)
    assert host.cpu_end_seconds == pytest.approx(SENDING_SECONDS, rel=1e-3)
    assert host.fetch_seconds == pytest.approx(PREPARING_SECONDS / FETCHES_A_LAUNCH, rel=1e-3)
    assert alone.dense_seconds == was.dense_seconds
    assert alone.cpu_first_expert_seconds == was.cpu_first_expert_seconds
    now = after.charged(alone)
    grown = [a - b for a, b in zip(now.dense_seconds, was.dense_seconds, strict=True)]
    assert grown == pytest.approx([host.layer_seconds] * len(grown))
    assert now.cpu_first_expert_seconds - was.cpu_first_expert_seconds == pytest.approx(
        host.cpu_end_seconds
    )
    assert now.link_seconds_per_expert == host.fetch_seconds
    # Prefetches are limited by the link's own rate.
    link = PREPARING_SECONDS / 100 / 8
    assert alone.link_seconds_per_expert == pytest.approx(link)
    assert after.link_bytes_per_second == pytest.approx(now.expert_bytes / link)


def test_steps_that_are_one_graph_have_costs_of_their_own(
    store: HostStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton")
    with interpreted():
        streams, few = LazyStreams(is_eager=True), TrialLimits(layers=4, router_experts=4)
        costs = graph_costs(HostSignals(), streams, HIDDEN, 1e-6, limits=few)
        impatient = TrialLimits(layers=4, doorbell_seconds=0.01)
        with pytest.raises(RuntimeError, match="did not reach the host"):  # and nothing hangs
            graph_costs(NeverRings(), streams, HIDDEN, 1e-6, limits=impatient)
    assert costs.layer_seconds > 0
    assert costs.cpu_begin_seconds == costs.cpu_end_seconds >= 0
    assert costs.second_launch_seconds >= costs.layer_seconds  # two more kernels, and fetching
    assert 0 < costs.copy_wake_seconds < 1
    assert costs.asking_seconds >= 0

    def graph(fetch_seconds: float) -> HostCosts:
        return dataclasses.replace(costs, fetch_seconds=fetch_seconds)

    _, after = measured(store, monkeypatch, Noting(clock := Clock()), clock, graph)
    assert [host.path for host in after.host] == ["graph", "segments"]
    assert after.host[0].fetch_seconds == after.host[1].fetch_seconds
    assert after.host_costs() is after.host[0]
