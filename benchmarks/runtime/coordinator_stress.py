"""Captured steps on the CPU twin under random delays, deaths, sizes and interruptions.

python -m benchmarks.runtime.coordinator_stress --minutes 30

Each step fetches nothing for the running layer, or some misses by either rule. Some steps copy
experts of the next layer ahead and ask its router; the answer is right, wrong or missing. Copies
arrive at once, late, or after the step, as with a driver whose calls block. Every result is
compared with the CPU executor's bit by bit, every slot with the expert that the table names; a lost
step is one sentence, and the next one is right. Memory and threads must not grow. The last line is
JSON.
"""

import argparse
import dataclasses
import json
import os
import random
import sys
import threading
import time
from collections.abc import Callable, Sequence

import torch
from tests.experts.captured import (
    LayerTokens,
    TwinMachine,
    random_step,
    right_guesses,
    sure_of_predictions,
)
from tests.experts.machines import FUNCTIONS, GEOMETRY, make_machine, make_store
from tests.experts.stress import memory_bytes, require_no_growth

from tandem.experts.cache.policy_tables import NATIVE_TABLES, native_step_policy
from tandem.experts.execution.executor import CpuExecutor
from tandem.experts.store.host_store import HostStore
from tandem.kernels import _native
from tandem.kernels.dense import CpuThreads
from tandem.policy.assignment import IN_GRAPH
from tandem.policy.cost import CostTable
from tandem.policy.settings import PlannerSettings, make_planner
from tandem.policy.step_path import CAPTURE_SIZES

NUM_EXPERTS = GEOMETRY.num_layers * GEOMETRY.num_experts
STEPS_PER_ENGINE = 40
SHORT_PATIENCE = 0.05  # seconds
SETTINGS = PlannerSettings(
    prediction="regression",
    prefetch_count=2,
    predicting_sizes=CAPTURE_SIZES,
    never_worse_than_cpu=False,
)
FORMATS = ("int8", "int4", "bf16")


class WrongError(AssertionError):
    """A forbidden event has happened."""


@dataclasses.dataclass(slots=True)
class Outcome:
    """The counts of a run."""

    engines: int = 0
    steps: int = 0
    lost_steps: int = 0
    interruptions: int = 0
    experts_copied: int = 0
    hits: int = 0
    experts_fetched: int = 0
    experts_ahead: int = 0
    memory_bytes: list[int] = dataclasses.field(default_factory=list)


class Trouble:
    """Disturbs the answering thread at each layer, at random."""

    def __init__(self, draw: random.Random, chance: float) -> None:
        """Disturb each layer with probability `chance`."""
        self._draw, self._chance = draw, chance

    def __call__(self, layer: int) -> None:
        """Be slow, stall for longer than the watchdog waits, or end the thread."""
        if self._draw.random() >= self._chance:
            return
        kind = self._draw.choice(("slow", "stall", "die"))
        if kind == "die":
            raise MemoryError("no memory")
        time.sleep(self._draw.random() * (0.002 if kind == "slow" else 3 * SHORT_PATIENCE))


def late_copies(draw: random.Random, is_between: threading.Event) -> Callable[[], None]:
    """Return a function that delays each copy: hardly, for some time, or until the step's end.

    It must not reference an engine: native code holds it, and that engine would never be freed.
    """
    delay, blocks = draw.choice((0.0, 1e-4, 2e-3)), draw.random() < 0.2

    def be_late() -> None:
        if blocks:
            is_between.wait()
        time.sleep(draw.random() * delay)

    return be_late


class Engine:
    """One coordinator with its slots, of random size."""

    def __init__(self, draw: random.Random, outcome: Outcome, stores: Sequence[HostStore]) -> None:
        """Choose the sizes and options at random."""
        self._draw, self._outcome = draw, outcome
        self._store = draw.choice(stores)
        self._alone = CpuExecutor(self._store, CpuThreads(num_threads=1))
        self._capture_size = draw.choice((1, 1, 2, 4, 8))
        self._dtype = draw.choice((torch.float32, torch.bfloat16))
        num_slots = draw.randrange(NUM_EXPERTS + 3)
        costs = CostTable(make_machine(cpu=2e-5, gpu=1e-5, link=draw.choice((0.0, 2e-5))).shape)
        planner = make_planner(SETTINGS, GEOMETRY, costs, num_slots, tables=NATIVE_TABLES)
        sure_of_predictions(planner)
        self._policy = native_step_policy(planner)
        self._guesses: list[list[int]] = []  # of the step before
        self._is_between = threading.Event()
        self._is_between.set()
        self._machine = TwinMachine(
            self._store,
            self._capture_size,
            num_slots=num_slots,
            dtype=self._dtype,
            num_threads=draw.choice((1, 2)),
            most_delay=draw.choice((0, 50, 300)),
            policy=self._policy,
            before_copy=late_copies(draw, self._is_between),
        )
        self._has_trouble = draw.random() < 0.5
        if self._has_trouble:
            self._machine.coordinator.set_hook(Trouble(draw, 0.02))

    def run(self) -> None:
        """Run some steps, then check the slots' contents."""
        generator = torch.Generator().manual_seed(self._draw.randrange(1 << 30))
        try:
            for _ in range(STEPS_PER_ENGINE):
                tokens = self._draw.randint(0, self._capture_size)
                padding = self._draw.choice((0.0, 0.2))
                self._step(random_step(tokens, generator, GEOMETRY, self._dtype, padding))
            self._check_slots()
        finally:
            self._is_between.set()
            self._machine.close()
        self._outcome.engines += 1

    def _step(self, step: list[LayerTokens]) -> None:
        self._is_between.clear()
        try:
            self._run_step(step)
        finally:
            self._is_between.set()

    def _run_step(self, step: list[LayerTokens]) -> None:
        outcome, machine = self._outcome, self._machine
        outcome.steps += 1
        rule, predicts = self._draw.choice(range(len(IN_GRAPH))), self._draw.random() < 0.5
        asks = self._draw.random() < 0.5
        machine.twin.set_guesses(self._draw.choice(([], right_guesses(step), self._guesses)))
        self._guesses = right_guesses(step)
        if self._draw.random() < 0.03:  # the device is not told to go on, and the caller gives up
            stops_before = self._draw.randrange(GEOMETRY.num_layers)
            machine.start(step, rule, stops_before, predicts=predicts, asks=asks)
            machine.twin.join()
            machine.coordinator.abort_step(20.0)
            outcome.interruptions += 1
            return
        try:
            patience = SHORT_PATIENCE if self._has_trouble else 20.0
            machine.run(step, rule, patience, predicts=predicts, asks=asks)
        except _native.StepLostError as error:
            if not self._has_trouble or "\n" in str(error):
                raise WrongError(f"a step was lost: {error}") from error
            outcome.lost_steps += 1
            return
        for layer, call in enumerate(step):
            expected = self._alone.execute(layer, call.hidden, call.chosen, call.weights, FUNCTIONS)
            if not torch.equal(call.out, expected):
                raise WrongError(f"layer {layer} differs from the CPU's")
        for record in machine.coordinator.records():
            outcome.hits += sum(record[2])
            outcome.experts_fetched += len(record[-1])
        outcome.experts_ahead += sum(len(at[-1]) for at in machine.coordinator.take_decided())

    def _check_slots(self) -> None:
        """Wait for all copies; the table must then name the experts in the slots."""
        machine = self._machine
        machine.coordinator.clear_entries()
        machine.coordinator.begin_copies()
        machine.coordinator.drain_copies()
        assert self._policy is not None
        state, slot_of, *_ = self._policy.resident()
        for key in range(NUM_EXPERTS):
            layer, expert = divmod(key, GEOMETRY.num_experts)
            address = int(machine.table[layer, expert])
            if not state[key]:
                if address:
                    raise WrongError(f"expert {key} has left, and the table says it is there")
                continue
            slot = machine.slots[slot_of[key]]
            (extent,) = self._store[layer].extents(expert)
            if address != slot.data_ptr() or not torch.equal(slot[: len(extent.data)], extent.data):
                raise WrongError(f"expert {key} is not in its slot")
            self._outcome.experts_copied += 1


def stress(*, seconds: float, seed: int) -> Outcome:
    """Run engines, one after another; raises `WrongError` for a violation."""
    draw, outcome = random.Random(seed), Outcome()
    stores = [make_store(expert_dtype=name) for name in FORMATS]
    end, threads = time.monotonic() + seconds, 0
    while time.monotonic() < end:
        Engine(draw, outcome, stores).run()
        now = len(os.listdir("/proc/self/task"))
        if threads and now > threads:
            raise WrongError(f"{now} threads after an engine's end, {threads} after the first's")
        threads = threads or now
        outcome.memory_bytes.append(memory_bytes())
    require_no_growth(outcome.memory_bytes)
    return outcome


def main() -> int:
    """Run for some minutes and print the counts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--seed", type=int, default=0)
    flags = parser.parse_args()
    torch.set_num_threads(1)
    outcome = stress(seconds=60.0 * flags.minutes, seed=flags.seed)
    memory = outcome.memory_bytes
    counts = {k: v for k, v in dataclasses.asdict(outcome).items() if k != "memory_bytes"}
    print(", ".join(f"{count} {name.replace('_', ' ')}" for name, count in counts.items()))
    print(json.dumps(counts | {"first_memory_bytes": memory[0], "last_memory_bytes": memory[-1]}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
