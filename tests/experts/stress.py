"""A stress test on the wall clock with random delays, sizes, faults and interruptions.

python -m tests.experts.stress --minutes 30

Results must be bit-identical to the CPU's; memory and threads must not grow.
"""

import argparse
import random
import resource
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from tandem.core.errors import ExecutionError
from tandem.experts.cache.sizing import OutOfDeviceMemoryError
from tandem.experts.execution.executor import CpuExecutor
from tandem.experts.execution.hybrid_executor import HybridExecutor
from tandem.kernels.dense import CpuThreads
from tandem.policy.assignment import ASSIGNMENTS
from tandem.policy.eviction import EVICTIONS
from tandem.policy.plan import Copy
from tandem.policy.settings import PlannerSettings
from tandem.sim.systems import POLICIES, SimulatedSettings
from tests.experts.faults import Disturbance, FaultyDevice
from tests.experts.machines import FUNCTIONS, GEOMETRY, make_real_executor, make_store, route

NUM_EXPERTS = GEOMETRY.num_layers * GEOMETRY.num_experts
STEPS_PER_ENGINE = 40
_GROWTH_BYTES = 64 << 20


class Interruption(BaseException):
    """Stands for Ctrl-C, raised at a random moment of this thread."""


@dataclass(slots=True)
class Outcome:
    """The counts of a stress run."""

    engines: int = 0
    steps: int = 0
    errors: int = 0
    interruptions: int = 0
    resizes: int = 0
    memory_bytes: list[int] = field(default_factory=list)


class _Trouble:
    """Raises an error at random."""

    def __init__(self, draw: random.Random, error: BaseException, chance: float) -> None:
        self._draw, self._error, self._chance = draw, error, chance

    def __call__(self, copy: Copy | None = None) -> None:
        if self._draw.random() < self._chance:
            raise self._error


def _settings(draw: random.Random) -> PlannerSettings:
    prefetch = draw.choice(("none", "top-k", "pays"))
    return SimulatedSettings(
        assignment=draw.choice(ASSIGNMENTS.names()),
        eviction=draw.choice(EVICTIONS.names()),
        prediction=draw.choice(POLICIES.predictions.names()),
        prefetch=prefetch,
        prefetch_count=2,
        pool=draw.choice(("by-layer", "shared")),
        never_worse_than_cpu=draw.random() < 0.5,
    )


def _one_engine(draw: random.Random, outcome: Outcome) -> None:
    """Run some steps of one engine with disturbances."""
    store = make_store()
    alone = CpuExecutor(store, CpuThreads(num_threads=1))
    disturbance = Disturbance(
        random.Random(draw.random()),
        draw.choice((0.0, 1e-4, 2e-3)),
        draw.random() < 0.5,
        fault=_Trouble(draw, OSError("the link broke"), draw.choice((0.0, 0.003))),
    )
    executor = make_real_executor(
        store,
        draw.randrange(NUM_EXPERTS + 1),
        _settings(draw),
        disturbance=disturbance,
        bytes_per_second=draw.choice((None, 1e7, 1e9)),
    )
    assert isinstance(executor.device, FaultyDevice)
    wrong = (RuntimeError("a bit fell over"), OutOfDeviceMemoryError("no room"))
    executor.device.fault = _Trouble(draw, draw.choice(wrong), draw.choice((0.0, 0.02)))
    generator = torch.Generator().manual_seed(draw.randrange(1 << 30))
    try:
        for _ in range(STEPS_PER_ENGINE):
            _step(executor, alone, generator, draw, outcome)
    finally:
        executor.device.fault = None
        executor.close()
    outcome.engines += 1


def _step(
    executor: HybridExecutor,
    alone: CpuExecutor,
    generator: torch.Generator,
    draw: random.Random,
    outcome: Outcome,
) -> None:
    if draw.random() < 0.1:
        executor.resize(draw.randrange(NUM_EXPERTS + 1))
        outcome.resizes += 1
    batch = draw.choice((1, 1, 1, 4, 30))
    executor.begin_step(range(batch), is_prefill=batch > 4)
    synchronize = executor.device.synchronize
    if draw.random() < 0.02:
        executor.device.synchronize = _Trouble(draw, Interruption(), 1.0)  # type: ignore[method-assign]
    try:
        for layer in range(GEOMETRY.num_layers):
            call = route(batch, generator)
            actual = executor.execute(layer, *call, FUNCTIONS)
            assert torch.equal(actual, alone.execute(layer, *call, FUNCTIONS)), "a wrong result"
    except ExecutionError:
        outcome.errors += 1
    except Interruption:
        outcome.interruptions += 1
    finally:
        executor.device.synchronize = synchronize  # type: ignore[method-assign]
    outcome.steps += 1


def memory_bytes() -> int:
    """Return the resident memory of this process in bytes."""
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


def require_no_growth(memory: Sequence[int]) -> None:
    """Raise AssertionError if memory at the end exceeds that of the first third."""
    growth = memory[-1] - max(memory[: len(memory) // 3], default=memory[-1])
    assert growth < _GROWTH_BYTES, f"memory has grown by {growth} bytes"


def stress(*, seconds: float, seed: int) -> Outcome:
    """Run engines one after another; raises AssertionError for wrong results or growth."""
    draw = random.Random(seed)
    outcome = Outcome()
    end, before = time.monotonic() + seconds, set(threading.enumerate())
    while time.monotonic() < end:
        _one_engine(draw, outcome)
        new = set(threading.enumerate()) - before
        left = [t.name for t in new if t.name.startswith("tandem-")]
        assert not left, f"threads are left: {left}"
        outcome.memory_bytes.append(memory_bytes())
    require_no_growth(outcome.memory_bytes)
    return outcome


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--seed", type=int, default=0)
    flags = parser.parse_args()
    torch.set_num_threads(1)
    outcome = stress(seconds=60.0 * flags.minutes, seed=flags.seed)
    first, last = outcome.memory_bytes[0], outcome.memory_bytes[-1]
    print(
        f"{outcome.engines} engines, {outcome.steps} steps, {outcome.resizes} changes of size, "
        f"{outcome.errors} errors, {outcome.interruptions} interruptions; "
        f"memory {first >> 20} MiB at the first engine's end, {last >> 20} MiB at the last's"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
