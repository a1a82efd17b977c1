"""Tests of layers that a captured step hands over: interpreted kernels and the real coordinator.

This thread is the stream; the coordinator's thread answers what publish writes.
"""

import threading
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from tandem.core.errors import TandemWarning
from tandem.devices.cuda import hand_over_trial, handed_steps
from tandem.devices.cuda.hand_over_trial import Trial, TrialLimits, find_signals
from tandem.devices.cuda.signals import KernelSignals, Signals
from tandem.experts.execution.executor import CpuExecutor
from tandem.experts.store.host_store import HostStore
from tandem.experts.store.packed_layer import PackedLayer
from tandem.kernels import _native
from tandem.kernels.dense import CpuThreads
from tandem.kernels.engine import best_isa
from tandem.kernels.native import TOKEN_DTYPES
from tandem.policy.assignment import IN_GRAPH
from tests.experts.captured import fetching_policy, native_layers
from tests.experts.machines import FUNCTIONS, GEOMETRY, HIDDEN
from tests.kernels.interpreter import interpreted_module

pytest.importorskip("triton")
PATIENCE = 20.0


handed = interpreted_module("tandem.devices.cuda.handed_layers")


class HostSignals:
    """Does immediately what a stream does in its order."""

    name, wait_seconds = "words", 0.0

    def ring(self, doorbell: Tensor) -> None:
        doorbell.fill_(1)

    def wait(self, done: Tensor) -> None:
        while int(done) != 1:
            pass


class Machine:
    """A coordinator and a step's layers for this many tokens, with some experts resident."""

    def __init__(
        self,
        handed: ModuleType,
        store: HostStore,
        num_tokens: int,
        resident: set[int],
        signals: Any,
        *,
        fetches: bool = False,
    ) -> None:
        from tandem.triton_kernels.experts import TritonExperts

        self.store = store
        self.coordinator = _native.StepCoordinator(native_layers(store), 1, best_isa())
        box = _native.MailboxLayout(
            GEOMETRY.num_layers, num_tokens, GEOMETRY.top_k, HIDDEN, TOKEN_DTYPES[torch.float32]
        )
        memory = torch.zeros(box.num_bytes, dtype=torch.uint8)
        self.number = self.coordinator.add_mailbox(
            num_tokens, GEOMETRY.top_k, TOKEN_DTYPES[torch.float32], memory
        )
        self.table = torch.zeros(GEOMETRY.num_layers, GEOMETRY.num_experts, dtype=torch.int64)
        for number, layer in enumerate(store):
            assert isinstance(layer, PackedLayer)
            for expert in resident:
                self.table[number, expert] = layer.buffers[expert].data_ptr()
        words = torch.zeros(1, dtype=torch.int32)
        self.waits = handed.handing.WaitWords.on(torch.device("cpu"), words)
        self.box, self.memory = box, memory
        self.layers = handed.HandedLayers(
            store, box, memory, self.table, TritonExperts(), signals, self.waits, fetches=fetches
        )

    def manage_slots(self, num_slots: int, rule: str) -> None:
        """Let a rule decide which experts are copied."""
        self.slots = torch.zeros(num_slots, self.store[0].image_bytes, dtype=torch.uint8)
        addresses = [slot.data_ptr() for slot in self.slots]
        self.policy = fetching_policy(rule, num_slots)
        self.coordinator.manage_slots(
            self.table, addresses, self.slots.shape[1], self.policy, 0.0, None
        )

    def step(self, calls: list[tuple[Tensor, Tensor, Tensor]]) -> list[Tensor]:
        """Hand over all layers; return their results."""
        self.coordinator.begin_step(self.number, PATIENCE)
        found = [self.layers(layer, *call, FUNCTIONS) for layer, call in enumerate(calls)]
        self.coordinator.finish_step(PATIENCE)
        return found


def random_calls(num_tokens: int, seed: int) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Return hidden states, choices (one of them padding) and weights for each layer."""
    random = torch.Generator().manual_seed(seed)
    calls = []
    for _ in range(GEOMETRY.num_layers):
        scores = torch.rand(num_tokens, GEOMETRY.num_experts, generator=random)
        weights, index = scores.topk(GEOMETRY.top_k)
        index[-1, 0] = GEOMETRY.num_experts
        calls.append((torch.randn(num_tokens, HIDDEN, generator=random), index, weights))
    return calls


@pytest.mark.parametrize("make_signals", [HostSignals, None], ids=["words", "kernels"])
@pytest.mark.parametrize("num_tokens", [1, 2])
@pytest.mark.parametrize(
    "resident", [set(), {0, 2, 3, 7}, set(range(8))], ids=["none", "some", "all"]
)
def test_hits_and_misses_together_are_the_layer(
    handed: ModuleType,
    store: HostStore,
    resident: set[int],
    num_tokens: int,
    make_signals: Callable[[], Any] | None,
) -> None:
    signals = make_signals() if make_signals else KernelSignals(9.0)
    machine = Machine(handed, store, num_tokens, resident, signals)
    cpu = CpuExecutor(store, CpuThreads(num_threads=1))
    for seed in range(2):  # words are unchanged after a step
        calls = random_calls(num_tokens, seed)
        results = machine.step(calls)
        for layer, (call, found) in enumerate(zip(calls, results, strict=True)):
            expected = cpu.execute(layer, *call, FUNCTIONS)
            # On the CPU activations are rounded to int8, in Triton they are not.
            assert float((found - expected).norm() / expected.norm()) < (0.03 if resident else 1e-6)
        records = machine.coordinator.records()
        misses = [sum(1 - hit for hit in is_hit) for _, _, is_hit, *_ in records]
        wanted = [
            sum(e < GEOMETRY.num_experts and e not in resident for e in index.flatten().tolist())
            for _, index, _ in calls
        ]
        assert misses == wanted
    machine.coordinator.close()


@pytest.mark.parametrize("make_signals", [HostSignals, None], ids=["words", "kernels"])
@pytest.mark.parametrize("num_tokens", [1, 2])
@pytest.mark.parametrize("rule", IN_GRAPH)
def test_what_the_host_has_fetched_is_launched_again(
    handed: ModuleType,
    store: HostStore,
    rule: str,
    num_tokens: int,
    make_signals: Callable[[], Any] | None,
) -> None:
    signals = make_signals() if make_signals else KernelSignals(9.0)
    fetches = rule != "ready-on-gpu"
    machine = Machine(handed, store, num_tokens, set(), signals, fetches=fetches)
    machine.manage_slots(8, rule)
    cpu, num_fetched = CpuExecutor(store, CpuThreads(num_threads=1)), 0
    for seed in range(4):
        calls = random_calls(num_tokens, seed)
        machine.coordinator.clear_entries()
        for layer, (call, found) in enumerate(zip(calls, machine.step(calls), strict=True)):
            expected = cpu.execute(layer, *call, FUNCTIONS)
            assert float((found - expected).norm() / expected.norm()) < 0.03
        num_fetched += sum(len(record[-1]) for record in machine.coordinator.records())
    assert (num_fetched > 0) == fetches
    assert int(machine.waits.given_up) == 0
    answers = [
        machine.memory[start : start + 8 * num_tokens * GEOMETRY.top_k]
        for start in (layer * machine.box.layer_bytes + machine.box.fetched for layer in range(2))
    ]
    assert any(bool(answer.any()) for answer in answers) <= fetches  # no other writer
    machine.coordinator.close()


def test_a_layer_that_nobody_answers_is_given_up_and_later_ones_do_not_wait(
    handed: ModuleType, store: HostStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = Machine(handed, store, 2, {0, 2}, KernelSignals(9.0))
    is_stopped = threading.Event()

    def stop(layer: int) -> None:
        assert layer != 1 or is_stopped.wait(PATIENCE)

    machine.coordinator.set_hook(stop)
    calls, found = random_calls(2, 0), []
    machine.coordinator.begin_step(machine.number, PATIENCE)
    for layer, call in enumerate(calls):
        # Layers after the first one that is given up would exceed this test's time.
        looks = {0: 1 << 30, 1: 50}.get(layer, 1 << 30)
        monkeypatch.setattr(handed.handing, "_LOOKS_OFF_GPU", looks)
        found.append(machine.layers(layer, *call, FUNCTIONS))
    assert [bool(out.isnan().all()) for out in found] == [False, *[True] * (len(calls) - 1)]
    assert int(machine.waits.given_up) == 1
    is_stopped.set()
    machine.coordinator.finish_step(PATIENCE)  # the host answers what it finds
    machine.waits.given_up.zero_()
    assert all(bool(out.isfinite().all()) for out in machine.step(calls))
    assert int(machine.waits.given_up) == 0
    machine.coordinator.close()


def test_what_is_not_handed_over_breaks_the_graph(handed: ModuleType, store: HostStore) -> None:
    machine = Machine(handed, store, 1, set(), HostSignals())
    hidden, index, weights = random_calls(9, 0)[0]
    assert machine.layers(0, hidden, index, weights, FUNCTIONS) is None
    machine.coordinator.close()


IMPATIENT, PATIENT = TrialLimits(come_seconds=0.1), TrialLimits(come_seconds=20.0)


class ThreadStreams:
    """Several streams, one of which runs on a thread."""

    device = torch.device("cpu")

    def __init__(self) -> None:
        self._thread = threading.Thread()

    def pinned(self, num_bytes: int) -> Tensor:
        return torch.zeros(num_bytes, dtype=torch.uint8)

    def run(self, stream: object, work: Callable[[], None]) -> None:
        self._thread = threading.Thread(target=work, daemon=True)
        self._thread.start()

    def record(self, stream: object) -> Any:
        thread = self._thread

        class End:
            def query(self) -> bool:
                return not thread.is_alive()

        return End()


class OneAtATime(ThreadStreams):
    """A driver that blocks each launch until it has ended, as with CUDA_LAUNCH_BLOCKING."""

    def run(self, stream: object, work: Callable[[], None]) -> None:
        super().run(stream, work)
        self._thread.join()


@pytest.mark.parametrize("signals", [KernelSignals(9.0), HostSignals()])
def test_a_driver_that_holds_each_launch_is_found_out(handed: ModuleType, signals: Signals) -> None:
    streams: Any = OneAtATime()
    assert not Trial(signals, streams, 1, limits=IMPATIENT).works()


class NothingPinned(ThreadStreams):
    """A machine that limits how much memory can be mapped."""

    def pinned(self, num_bytes: int) -> Tensor:
        raise RuntimeError("CUDA error: operation not supported")


def test_without_mapped_memory_nothing_is_handed_over(handed: ModuleType) -> None:
    streams: Any = NothingPinned()
    assert find_signals(streams) is None


def test_a_machine_without_signals_says_so_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handed_steps, "find_signals", lambda streams: None)
    device: Any = SimpleNamespace(
        grouped_experts="some", streams=SimpleNamespace(device=torch.device("cpu"))
    )
    cache: Any = None
    threads: Any = None
    with pytest.warns(TandemWarning, match=r"at the experts of each layer.*cannot signal each"):
        steps = handed_steps.handed_steps(cache, [], threads, torch.float32, device, None)
    assert steps is None


class NeverRings(HostSignals):
    """A machine whose device writes never reach the host."""

    def ring(self, doorbell: Tensor) -> None:
        """Do nothing."""


def test_signals_are_tried_before_they_are_used(
    handed: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hand_over_trial, "open_driver", lambda: None)
    streams: Any = ThreadStreams()
    found = find_signals(streams, PATIENT)
    assert found is not None
    assert found.name == "polling kernels"
    assert Trial(HostSignals(), streams, 1, limits=PATIENT).works()
    assert not Trial(NeverRings(), streams, 1, limits=IMPATIENT).works()


def test_of_two_ways_that_work_the_quicker_is_taken(
    handed: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    seconds: dict[str, Any] = {}

    def answered_seconds(trial: Trial) -> float:
        if seconds[trial.signals.name] is None:
            raise RuntimeError("a layer's doorbell did not reach the host")
        return float(seconds[trial.signals.name])

    monkeypatch.setattr(hand_over_trial, "_stream_signals", lambda _: HostSignals())
    monkeypatch.setattr(Trial, "answered_seconds", answered_seconds)
    streams: Any = ThreadStreams()
    for of_words, quickest in (
        (1e-6, "words"),
        (3e-6, "polling kernels"),
        (None, "polling kernels"),
    ):
        seconds.update({"words": of_words, "polling kernels": 2e-6})
        found = find_signals(streams, PATIENT)
        assert found is not None
        assert found.name == quickest
