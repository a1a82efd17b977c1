"""DALI's 0-1 program (equations 3 to 9) solved exactly, and a lower bound for layers too large.

Experts are decided one after another; of the partial answers only those are kept that no other
beats in both times (a Pareto frontier), and whose linear relaxation can still beat the best answer
known. With an upper bound that is nearly optimal (`Balanced`) frontiers stay short.
"""

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


class Exact:
    """The oracle: the least max(T_gpu, T_cpu) that equations 3 to 9 allow."""

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


def solve(
    cpu: Floats, gpu: Floats, absent: npt.NDArray[np.bool_], max_fetches: int, best: float
) -> list[bool] | None:
    """Return which experts the optimum puts on the GPU; None if nothing is below `best`."""
    ratio = np.divide(gpu, cpu, out=np.full(len(cpu), np.inf), where=cpu > 0)
    order = np.lexsort((ratio, ~absent))  # absent ones first: only they count against the limit
    limited = max_fetches < int(absent.sum())
    frontier = _Frontier(limited)
    for place, i in enumerate(order):
        rest = order[place + 1 :]
        frontier.decide(int(i), cpu[i], gpu[i], bool(absent[i]), max_fetches)
        frontier.prune(best, Relaxation(cpu[rest], gpu[rest]))
    if not len(frontier.cpu):
        return None
    winner = int(np.argmin(np.maximum(frontier.cpu, frontier.gpu)))
    mask = int(frontier.mask[winner])
    return [bool(mask >> i & 1) for i in range(len(cpu))]


class Relaxation:
    """What the experts that are not decided yet must add at least, if they could be divided."""

    def __init__(self, cpu: Floats, gpu: Floats) -> None:
        """Sort by ratio; keep the processors' sums by the share that is on the GPU."""
        ratio = np.divide(gpu, cpu, out=np.full(len(cpu), np.inf), where=cpu > 0)
        order = np.argsort(ratio, kind="stable")
        self._gpu = np.concatenate(([0.0], np.cumsum(gpu[order])))
        self._cpu = np.concatenate(([0.0], np.cumsum(cpu[order][::-1])))[::-1]

    def bound(self, cpu: Floats, gpu: Floats, slowdown: float = 1.0) -> Floats:
        """Return a lower bound on max(T_gpu, slowdown * T_cpu) for partial sums (cpu, gpu)."""
        # On the line between neighbouring prefixes gpu rises and cpu falls; where they are equal
        # is the bound, by interpolation of their difference.
        difference = self._gpu - slowdown * self._cpu  # rising
        gap = slowdown * cpu - gpu
        at_gpu = np.interp(gap, difference, self._gpu)
        at_cpu = np.interp(gap, difference, self._cpu)
        return np.maximum(gpu + at_gpu, slowdown * (cpu + at_cpu))


class _Frontier:
    """Partial answers that no other partial answer dominates."""

    def __init__(self, limited: bool) -> None:
        self.cpu = np.zeros(1)
        self.gpu = np.zeros(1)
        self.mask = np.zeros(1, dtype=np.uint64)
        self.fetches = np.zeros(1, dtype=np.int64)
        self._limited = limited

    def decide(self, i: int, cpu: float, gpu: float, absent: bool, max_fetches: int) -> None:
        """Branch every answer on expert i: CPU or GPU."""
        allowed = self.fetches < max_fetches if absent and self._limited else slice(None)
        bit = np.uint64(1 << i)
        self.cpu, self.gpu, self.mask, self.fetches = (
            np.concatenate((self.cpu + cpu, self.cpu[allowed])),
            np.concatenate((self.gpu, self.gpu[allowed] + gpu)),
            np.concatenate((self.mask, self.mask[allowed] | bit)),
            np.concatenate((self.fetches, self.fetches[allowed] + absent)),
        )

    def prune(self, best: float, rest: Relaxation) -> None:
        """Drop answers that cannot beat `best` or that another answer dominates."""
        slack = best * (1 - 1e-12)
        keep = np.flatnonzero(rest.bound(self.cpu, self.gpu) < slack)
        keep = keep[np.lexsort((self.cpu[keep], self.gpu[keep]))]
        if self._limited:
            by_count = [
                undominated(self.cpu, keep[self.fetches[keep] == count])
                for count in np.unique(self.fetches)
            ]
            keep = np.concatenate(by_count) if by_count else keep
        else:
            keep = undominated(self.cpu, keep)
        self.cpu, self.gpu = self.cpu[keep], self.gpu[keep]
        self.mask, self.fetches = self.mask[keep], self.fetches[keep]


def undominated(cpu: Floats, keep: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Keep those of rising gpu whose cpu is below all before, rounding aside."""
    if len(keep) == 0:
        return keep
    lowest = np.concatenate(([np.inf], np.minimum.accumulate(cpu[keep])[:-1]))
    return keep[cpu[keep] < lowest * (1 - 1e-13)]


def lower_bound(problem: LayerProblem) -> float:
    """Return the linear relaxation's optimum: no plan of equations 3 to 8 is below it."""
    rest = Relaxation(np.array(problem.cpu), np.array(equation_gpu(problem)))
    return float(rest.bound(np.zeros(1), np.zeros(1))[0])


def optimal_seconds(problem: LayerProblem) -> float:
    """Return the optimum up to 64 active experts, the lower bound above."""
    if len(problem.experts) > MAX_EXPERTS:
        return lower_bound(problem)
    return Exact().assign(problem).seconds
