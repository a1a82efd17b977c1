"""DALI's 0-1 program (equations 3 to 9) solved exactly, and a lower bound for larger layers.

Experts are decided one after another. Partial answers are kept only if no other beats them in both
times (a Pareto frontier) and their linear relaxation can still beat the best known answer. With a
nearly optimal upper bound (`Balanced`) frontiers stay short.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from tandem.policy.assignment.balanced import Balanced
from tandem.policy.assignment.problem import (
    LayerProblem,
    Split,
    equation_gpu,
    priced,
)

MAX_EXPERTS = 64  # a partial answer is a 64-bit mask
Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


class Exact:
    """The oracle: assigns experts with the smallest max(T_gpu, T_cpu) under equations 3 to 9."""

    pipelined = False

    def assign(self, problem: LayerProblem) -> Split:
        """Return an optimal split; `AssertionError` for more than 64 active experts."""
        assert len(problem.experts) <= MAX_EXPERTS, f"{len(problem.experts)} active experts"
        incumbent = Balanced(pipelined=False).assign(problem)
        on_gpu = solve(
            np.array(problem.cpu),
            np.array(equation_gpu(problem)),
            np.array([wait < 0 for wait in problem.wait]),
            problem.max_fetches,
            incumbent.seconds,
        )
        if on_gpu is None:
            return priced(problem, incumbent.fetch, incumbent.spill, pipelined=False)
        placed = list(zip(problem.experts, problem.wait, on_gpu, strict=True))
        fetch = [expert for expert, wait, taken in placed if wait < 0 and taken]
        spill = [expert for expert, wait, taken in placed if wait >= 0 and not taken]
        return priced(problem, fetch, spill, pipelined=False)


class Partial(NamedTuple):
    """Several partial answers: element i of each array belongs to answer i."""

    gpu: Floats  # when the GPU has computed its experts
    cpu: Floats
    fetches: Ints
    mask: npt.NDArray[np.uint64]  # of experts on the GPU

    @classmethod
    def start(cls, cpu_first: float = 0.0) -> "Partial":
        """Return one partial answer without decided experts; the CPU's time is `cpu_first`."""
        zero = np.zeros(1)
        return cls(zero, zero + cpu_first, np.zeros(1, np.int64), np.zeros(1, np.uint64))

    def keep(self, kept: Ints) -> "Partial":
        """Return the answers with these indices."""
        return Partial(self.gpu[kept], self.cpu[kept], self.fetches[kept], self.mask[kept])

    def branched(
        self, i: int, cpu: float, on_gpu: "Partial", gpu: Floats, copies: int
    ) -> "Partial":
        """Return both branches for expert i, concatenated.

        This object's answers with expert i on the CPU come first, then the answers `on_gpu` with
        expert i on the GPU. `gpu` are the new GPU times of `on_gpu`; `copies` is 1 if the GPU
        branch has a fetch to count for the expert, else 0.
        """
        return Partial(
            np.concatenate((self.gpu, gpu)),
            np.concatenate((self.cpu + cpu, on_gpu.cpu)),
            np.concatenate((self.fetches, on_gpu.fetches + copies)),
            np.concatenate((self.mask, on_gpu.mask | np.uint64(1 << i))),
        )

    def pruned(self, bound: Floats, best: float) -> "Partial":
        """Return the answers that can still beat `best` and that no other answer dominates.

        `bound` has a lower bound on each answer's time. An answer dominates another answer with as
        many fetches if it is at least as good in both times.
        """
        partial = self.keep(np.flatnonzero(bound < best * (1 - 1e-12)))
        partial = partial.keep(np.lexsort((partial.cpu, partial.gpu)))
        kept = [
            _undominated(partial.cpu, np.flatnonzero(partial.fetches == count))
            for count in np.unique(partial.fetches)
        ]
        return partial.keep(np.concatenate(kept)) if kept else partial

    def best(self, cpu: Floats, num_experts: int) -> list[bool] | None:
        """Return which experts the best answer puts on the GPU; None if there is no answer.

        `cpu` has the CPU's time in each answer.
        """
        if not len(self.gpu):
            return None
        mask = int(self.mask[int(np.argmin(np.maximum(self.gpu, cpu)))])
        return [bool(mask >> i & 1) for i in range(num_experts)]


def _undominated(cpu: Floats, keep: Ints) -> Ints:
    """Return those indices of `keep` whose `cpu` is below that of all earlier indices in `keep`.

    `keep` must list answers in ascending order of their GPU times.
    """
    lowest = np.concatenate(([np.inf], np.minimum.accumulate(cpu[keep])[:-1]))
    return keep[cpu[keep] < lowest * (1 - 1e-13)]


def solve(
    cpu: Floats, gpu: Floats, absent: npt.NDArray[np.bool_], max_fetches: int, best: float
) -> list[bool] | None:
    """Return which experts the optimum puts on the GPU; None if no answer takes less than `best`.

    `cpu` and `gpu` are the experts' seconds; at most `max_fetches` `absent` experts may be fetched.
    """
    ratio = np.divide(gpu, cpu, out=np.full(len(cpu), np.inf), where=cpu > 0)
    # Absent experts first, because only they count against the limit.
    order = np.lexsort((ratio, ~absent))
    is_limited = max_fetches < int(absent.sum())
    partial = Partial.start()
    for place, i in enumerate(order):
        rest, on_gpu, is_counted = order[place + 1 :], partial, bool(absent[i]) and is_limited
        if is_counted:
            on_gpu = partial.keep(np.flatnonzero(partial.fetches < max_fetches))
        partial = partial.branched(int(i), cpu[i], on_gpu, on_gpu.gpu + gpu[i], int(is_counted))
        bound = Relaxation(cpu[rest], gpu[rest]).bound(partial.cpu, partial.gpu)
        partial = partial.pruned(bound, best)
    return partial.best(partial.cpu, len(cpu))


class Relaxation:
    """The least time that undecided experts add if each could be divided between CPU and GPU."""

    def __init__(self, cpu: Floats, gpu: Floats) -> None:
        """Sort experts by gpu / cpu; for each k, sum up both times with the first k on the GPU."""
        ratio = np.divide(gpu, cpu, out=np.full(len(cpu), np.inf), where=cpu > 0)
        order = np.argsort(ratio, kind="stable")
        self._gpu = np.concatenate(([0.0], np.cumsum(gpu[order])))
        self._cpu = np.concatenate(([0.0], np.cumsum(cpu[order][::-1])))[::-1]

    def bound(self, cpu: Floats, gpu: Floats, slowdown: float = 1.0) -> Floats:
        """Return a lower bound on max(T_gpu, slowdown * T_cpu) for each partial answer.

        `cpu` and `gpu` are the seconds of the experts that each partial answer has decided.
        """
        # Between neighbouring prefixes gpu rises and cpu falls linearly. The bound is where they
        # are equal, found by interpolating their difference.
        difference = self._gpu - slowdown * self._cpu  # rising
        gap = slowdown * cpu - gpu
        at_gpu = np.interp(gap, difference, self._gpu)
        at_cpu = np.interp(gap, difference, self._cpu)
        return np.maximum(gpu + at_gpu, slowdown * (cpu + at_cpu))


def lower_bound(problem: LayerProblem) -> float:
    """Return the linear relaxation's optimum; no plan under equations 3 to 8 takes less time."""
    rest = Relaxation(np.array(problem.cpu), np.array(equation_gpu(problem)))
    return float(rest.bound(np.zeros(1), np.zeros(1))[0])


def optimal_seconds(problem: LayerProblem) -> float:
    """Return the optimum in seconds for up to 64 active experts, a lower bound for more."""
    if len(problem.experts) > MAX_EXPERTS:
        return lower_bound(problem)
    return Exact().assign(problem).seconds
