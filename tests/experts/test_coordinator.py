"""Tests of captured steps on the CPU twin: always the CPU executor's bits."""

import random
import threading
import time
from collections.abc import Iterator

import pytest
import torch
from benchmarks.runtime.coordinator_stress import stress

from tandem.experts.cache.native_predictor import NativePredictor
from tandem.experts.cache.policy_tables import native_step_policy
from tandem.experts.execution.executor import CpuExecutor
from tandem.experts.store.host_store import HostStore
from tandem.kernels import _native
from tandem.kernels.dense import CpuThreads
from tandem.kernels.native import TOKEN_DTYPES
from tandem.policy.assignment import IN_GRAPH
from tests.experts.captured import (
    PATIENCE,
    LayerTokens,
    TwinMachine,
    asking_planner,
    asking_policy,
    fetching_policy,
    random_step,
    right_guesses,
)
from tests.experts.machines import FUNCTIONS, GEOMETRY, make_store

NUM_EXPERTS = GEOMETRY.num_layers * GEOMETRY.num_experts


@pytest.fixture
def machine(store: HostStore) -> Iterator[TwinMachine]:
    machine = TwinMachine(store, 1, num_slots=1)
    yield machine
    machine.close()


def expected(store: HostStore, step: list[LayerTokens]) -> list[torch.Tensor]:
    alone = CpuExecutor(store, CpuThreads(num_threads=1))
    return [
        alone.execute(layer, call.hidden, call.chosen, call.weights, FUNCTIONS)
        for layer, call in enumerate(step)
    ]


def check(machine: TwinMachine, store: HostStore, step: list[LayerTokens]) -> None:
    machine.run(step)
    for call, wanted in zip(step, expected(store, step), strict=True):
        assert torch.equal(call.out, wanted)


@pytest.mark.every_isa
@pytest.mark.parametrize("name", ["bf16", "int8", "int4", "mxfp4"])
@pytest.mark.parametrize("dtype", TOKEN_DTYPES)
@pytest.mark.parametrize("size", [1, 2, 8])
def test_bits_equal_those_of_the_cpu(name: str, dtype: torch.dtype, size: int) -> None:
    """None, half and all of the experts resident; full batches, padding tokens, padded choices."""
    store, generator = make_store(expert_dtype=name), torch.Generator().manual_seed(size)
    machine = TwinMachine(store, size, num_slots=NUM_EXPERTS, dtype=dtype)
    for resident in (0, NUM_EXPERTS // 2, NUM_EXPERTS):
        keys = range(resident // 2, resident)
        for key in range(resident) if resident < NUM_EXPERTS else keys:
            machine.copy(*divmod(key, GEOMETRY.num_experts), key)
        machine.coordinator.drain_copies()
        for num_tokens in {1, size}:
            for padding in (0.0, 0.3):
                check(machine, store, random_step(num_tokens, generator, GEOMETRY, dtype, padding))
        computed = sum(record[4] for record in machine.coordinator.records())
        assert (computed == 0) == (resident == NUM_EXPERTS)
    machine.close()


def test_a_record_says_what_the_router_chose(store: HostStore, machine: TwinMachine) -> None:
    machine.copy(0, 3, 0)
    step = random_step(1, torch.Generator().manual_seed(0))
    check(machine, store, step)
    for layer, record in enumerate(machine.coordinator.records()):
        number, choice, is_hit, weights, num_computed, *times, in_time = record
        assert number == layer
        assert choice == step[layer].chosen[0].tolist()
        assert weights == step[layer].weights[0].tolist()
        assert num_computed == is_hit.count(0)
        assert times == sorted(times)
        assert in_time == []


@pytest.mark.parametrize("kind", ["dies", "stalls"])
def test_a_thread_that_fails_loses_one_step(
    store: HostStore, machine: TwinMachine, kind: str
) -> None:
    step, is_bad = random_step(1, torch.Generator().manual_seed(1)), True

    def fail(layer: int) -> None:
        if layer == 1 and is_bad:
            if kind == "dies":
                raise MemoryError("no memory for a list")
            time.sleep(0.5)

    machine.coordinator.set_hook(fail)
    message = "layer 1 was not answered"
    if kind == "dies":
        message = r"has ended \(MemoryError: no memory for a list\)"
    with pytest.raises(_native.StepLostError, match=message):
        machine.run(step, patience=0.1)
    is_bad = False
    for _ in range(3):
        check(machine, store, random_step(1, torch.Generator().manual_seed(2)))


def test_a_device_that_stops_is_told_from_a_thread_that_does(
    store: HostStore, machine: TwinMachine
) -> None:
    machine.start(random_step(1, torch.Generator()), stops_before=1)
    with pytest.raises(_native.StepLostError, match="layer 1 was not reached by the device"):
        machine.coordinator.finish_step(0.1)
    machine.twin.join()
    check(machine, store, random_step(1, torch.Generator()))


def test_a_device_that_comes_later_than_the_watchdog_waits_is_let_go(
    store: HostStore, machine: TwinMachine
) -> None:
    """The stress test found it: the step was given up while the device was still running."""
    machine.twin.set_dense_seconds(0.1)
    with pytest.raises(_native.StepLostError, match="layer 0 was not reached by the device"):
        machine.run(random_step(1, torch.Generator()), patience=0.03)
    machine.twin.set_dense_seconds(0.0)
    check(machine, store, random_step(1, torch.Generator()))


def test_a_slow_thread_is_waited_for(store: HostStore, machine: TwinMachine) -> None:
    machine.coordinator.set_hook(lambda layer: time.sleep(0.05))
    check(machine, store, random_step(1, torch.Generator()))


def test_a_step_can_be_given_up(store: HostStore, machine: TwinMachine) -> None:
    machine.start(random_step(1, torch.Generator()), stops_before=1)
    machine.twin.join()
    machine.coordinator.abort_step(PATIENCE)
    check(machine, store, random_step(1, torch.Generator()))


def assert_soon(event: threading.Event) -> None:
    assert event.wait(20.0)


def test_copies_that_block_until_the_step_ends_stop_nothing(store: HostStore) -> None:
    """A driver may hold a lock while a graph runs."""
    may_copy = threading.Event()
    machine = TwinMachine(store, 1, num_slots=2, before_copy=lambda: assert_soon(may_copy))
    machine.copy(0, 1, 0)
    check(machine, store, random_step(1, torch.Generator().manual_seed(3)))
    assert not machine.table.any()
    may_copy.set()
    machine.coordinator.drain_copies()
    assert machine.table[0, 1] == machine.slots[0].data_ptr()
    check(machine, store, random_step(1, torch.Generator().manual_seed(4)))
    machine.close()


@pytest.mark.parametrize("rule", IN_GRAPH[1:])
@pytest.mark.parametrize("num_slots", [4, 12])
def test_each_miss_is_fetched_or_computed_by_the_cpu(
    store: HostStore, rule: str, num_slots: int
) -> None:
    machine = TwinMachine(
        store, 2, num_slots=num_slots, most_delay=50, policy=fetching_policy(rule, num_slots)
    )
    num_fetched = 0
    for seed in range(30):
        check(machine, store, random_step(2, torch.Generator().manual_seed(seed)))
        for record in machine.coordinator.records():
            _, choice, is_hit, _, num_computed, *_, in_time = record
            missed = {e for e, hit in zip(choice, is_hit, strict=True) if not hit}
            assert num_computed + len(in_time) == len(missed)
            assert {*in_time} <= missed
            num_fetched += len(in_time)
    assert num_fetched > 0
    machine.close()


@pytest.mark.parametrize("rule", IN_GRAPH[1:])
def test_the_cpu_claims_what_a_blocked_driver_does_not_bring(store: HostStore, rule: str) -> None:
    """The graph never waits for a copy alone, because the driver may wait for the graph."""
    may_copy = threading.Event()
    machine = TwinMachine(
        store, 1, num_slots=12, policy=fetching_policy(rule, 12),
        before_copy=lambda: assert_soon(may_copy),
    )  # fmt: skip
    for seed in range(3):
        check(machine, store, random_step(1, torch.Generator().manual_seed(seed)))
        for record in machine.coordinator.records():
            assert record[4] == record[2].count(0)
            assert record[-1] == []
    may_copy.set()
    machine.coordinator.drain_copies()
    assert machine.table.any()  # experts that had a slot have arrived
    for seed in range(3, 6):
        check(machine, store, random_step(1, torch.Generator().manual_seed(seed)))
    machine.close()


@pytest.mark.parametrize("size", [1, 2])
def test_what_the_next_router_says_is_copied_ahead_and_computed_by_the_device(
    store: HostStore, size: int
) -> None:
    machine = TwinMachine(store, size, num_slots=12, policy=asking_policy(12))
    num_ahead, num_used = 0, 0
    for seed in range(20):
        step = random_step(size, torch.Generator().manual_seed(seed))
        guesses = right_guesses(step)
        machine.twin.set_guesses(guesses)
        check(machine, store, step)
        decided = machine.coordinator.take_decided()
        ahead = {copy[:2] for *_, copies in decided for copy in copies}
        assert all(expert in guesses[layer - 1] for layer, expert in ahead)
        num_ahead += len(ahead)
        for layer, choice, is_hit, *_ in machine.coordinator.records():
            pairs = zip(choice, is_hit, strict=True)
            num_used += len({expert for expert, hit in pairs if hit and (layer, expert) in ahead})
        machine.coordinator.clear_entries()
        machine.coordinator.drain_copies()
    assert num_ahead > 10
    assert num_used > 0
    machine.close()


@pytest.mark.parametrize("size", [1, 2])
def test_what_is_known_is_copied_ahead_of_a_step_and_computed_by_the_device(
    store: HostStore, size: int
) -> None:
    """This also holds after a step that was given up before its first layer."""
    machine = TwinMachine(store, size, num_slots=12, policy=asking_policy(12))
    for device in (machine.twin, machine.coordinator):
        device.set_dense_seconds(1e-3)
    num_ahead, num_used = 0, 0
    for seed in range(20):
        step = random_step(size, torch.Generator().manual_seed(seed))
        if seed % 4 == 3:
            machine.start(step, rule=0, stops_before=0, is_known=True)
            machine.twin.join()
            assert machine.coordinator.abort_step(PATIENCE)
        else:
            machine.run(step, rule=0, is_known=True)
            for call, wanted in zip(step, expected(store, step), strict=True):
                assert torch.equal(call.out, wanted)
        decided = machine.coordinator.take_decided()
        ahead = {copy[:2] for *_, copies in decided for copy in copies}
        assert all(expert in step[layer].chosen for layer, expert in ahead)
        num_ahead += sum(len(copies) for layer, *_, copies in decided if layer == -1)
        for layer, choice, is_hit, *_ in machine.coordinator.records() if seed % 4 < 3 else ():
            pairs = zip(choice, is_hit, strict=True)
            num_used += len({expert for expert, hit in pairs if hit and (layer, expert) in ahead})
        machine.coordinator.clear_entries()
        machine.coordinator.drain_copies()
    assert num_ahead > 10
    assert num_used > 0
    machine.close()


def test_no_guess_is_taken_of_what_is_known(store: HostStore) -> None:
    """Hints for a known layer are neither used nor waited for, so they are not counted."""
    planner = asking_planner(12)
    predictor, policy = planner.prediction, native_step_policy(planner)
    assert policy is not None
    assert isinstance(predictor, NativePredictor)
    machine = TwinMachine(store, 1, num_slots=12, policy=policy)
    taken = []
    for is_known in (True, False):
        before = predictor.state()[2]
        step = random_step(1, torch.Generator().manual_seed(0))
        machine.twin.set_guesses(right_guesses(step))
        machine.run(step, 0, predicts=True, asks=True, is_known=is_known)
        taken.append(predictor.state()[2] != before)
    assert taken == [False, True]
    machine.close()


def test_a_guess_that_does_not_come_is_not_waited_for(store: HostStore) -> None:
    machine = TwinMachine(store, 1, num_slots=12, policy=asking_policy(12))
    step = random_step(1, torch.Generator().manual_seed(0))
    machine.twin.set_guesses(right_guesses(step))
    check(machine, store, step)
    machine.coordinator.take_decided()
    machine.twin.set_guesses([])  # an earlier step's prediction is not used for this one
    check(machine, store, step)
    assert not [copies for *_, copies in machine.coordinator.take_decided() if copies]
    machine.close()


def test_a_slot_is_not_written_while_it_may_be_read(store: HostStore) -> None:
    machine = TwinMachine(store, 1, num_slots=1)
    machine.copy(0, 1, 0)
    machine.coordinator.drain_copies()
    before = machine.slots.clone()
    machine.copy(0, 2, 0, victim=1)
    machine.coordinator.drain_copies()  # nothing may begin
    assert torch.equal(machine.slots, before)
    assert machine.table[0, 1] != 0
    check(machine, store, random_step(1, torch.Generator().manual_seed(5)))
    machine.coordinator.drain_copies()
    assert machine.table[0].tolist() == [0, 0, machine.slots[0].data_ptr(), 0, 0, 0, 0, 0]
    assert not torch.equal(machine.slots, before)
    machine.close()


def test_a_copy_that_fails_is_reported_and_stops_no_step(store: HostStore) -> None:
    def fail() -> None:
        raise OSError("the link broke")

    machine = TwinMachine(store, 1, num_slots=1, before_copy=fail)
    machine.copy(0, 1, 0)
    machine.coordinator.drain_copies()
    assert "the link broke" in machine.coordinator.copy_error()
    check(machine, store, random_step(1, torch.Generator()))
    machine.close()


def step_with_copies(
    machine: TwinMachine, store: HostStore, draw: random.Random, size: int = 1
) -> int:
    """Run 40 steps while experts are copied into the slots; return the number of hits."""
    held: list[tuple[int, int] | None] = [None] * len(machine.slots)
    arrived, hits = set[tuple[int, int]](), 0
    for seed in range(40):
        arrived |= {arrival[:2] for arrival in machine.coordinator.take_arrivals()}
        for slot, old in enumerate(held):
            layer, expert = slot % GEOMETRY.num_layers, draw.randrange(GEOMETRY.num_experts)
            if (layer, expert) in held or (old is not None and old not in arrived):
                continue
            machine.copy(layer, expert, slot, -1 if old is None else old[1])
            arrived.discard(old or (-1, -1))
            held[slot] = layer, expert
        check(machine, store, random_step(size, torch.Generator().manual_seed(seed)))
        hits += sum(sum(record[2]) for record in machine.coordinator.records())
    return hits


@pytest.mark.parametrize("size", [1, 4])
def test_slots_hold_what_the_table_says_in_any_interleaving(store: HostStore, size: int) -> None:
    """Copy experts into few slots while all delays are random."""
    draw, num_slots = random.Random(size), 6
    machine = TwinMachine(
        store, size, num_slots=num_slots, most_delay=150,
        before_copy=lambda: time.sleep(draw.random() * 2e-4),
    )  # fmt: skip
    step_with_copies(machine, store, draw, size)
    machine.close()


def test_what_a_lost_step_has_decided_is_copied_all_the_same(store: HostStore) -> None:
    may_copy, policy = threading.Event(), fetching_policy("balanced-in-graph", 4, cpu=5.0)
    machine = TwinMachine(
        store, 1, num_slots=4, policy=policy, before_copy=lambda: assert_soon(may_copy)
    )
    generator = torch.Generator().manual_seed(7)
    with pytest.raises(_native.StepLostError, match="layer 0 was not answered"):
        machine.run(random_step(1, generator), patience=0.1)  # one is fetched, others get slots
    may_copy.set()
    check(machine, store, random_step(1, generator))
    machine.coordinator.clear_entries()
    machine.coordinator.begin_copies()
    machine.coordinator.drain_copies()
    state, slot_of, *_ = policy.resident()
    held = [key for key, is_held in enumerate(state) if is_held]
    assert held
    slots = [machine.slots[slot_of[key]].data_ptr() for key in held]
    assert machine.table.flatten()[held].tolist() == slots
    machine.close()


def test_a_short_stress() -> None:
    """For half an hour: python -m benchmarks.runtime.coordinator_stress."""
    for seconds in (1.0, 5.0, 25.0):  # a busy machine does few steps in one
        outcome = stress(seconds=seconds, seed=1)
        if min(outcome.steps - 40, outcome.experts_fetched, outcome.experts_ahead) > 0:
            break
    assert outcome.steps > 40
    assert outcome.hits > 0
    assert outcome.experts_fetched > 0
    assert outcome.experts_ahead > 0
