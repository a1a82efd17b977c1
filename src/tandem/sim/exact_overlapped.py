"""The optimum with copies that overlap computation: the least possible `pipeline_seconds`.

Residents are decided first, in the order in which the GPU runs them; then absent experts by
descending GPU time. That is the best order of copies, because it leaves the least to run after a
copy has arrived. Partial answers are kept only if no other answer with as many fetches beats them
in both times and their relaxation can still beat the best known answer.
"""

from collections.abc import Sequence

import numpy as np

from tandem.policy.assignment.balanced import Balanced
from tandem.policy.assignment.problem import LayerProblem, Split, priced
from tandem.sim.exact import MAX_EXPERTS, Floats, Ints, Partial, Relaxation


class ExactOverlapped:
    """The oracle of overlapped copies: assigns experts with the least `pipeline_seconds`."""

    pipelined = True

    def assign(self, problem: LayerProblem) -> Split:
        """Return an optimal split; `AssertionError` for more than 64 active experts."""
        assert len(problem.experts) <= MAX_EXPERTS, f"{len(problem.experts)} active experts"
        best = Balanced().assign(problem)
        everything = priced(problem, *_all_on_gpu(problem), pipelined=True)
        if len(everything.fetch) <= problem.max_fetches and everything.seconds < best.seconds:
            best = everything
        taken = _Search(problem, best.seconds).run()
        if taken is None:
            return priced(problem, best.fetch, best.spill, pipelined=True)
        fetch = [problem.experts[i] for i in _copy_order(problem) if taken[i]]
        placed = zip(problem.experts, problem.wait, taken, strict=True)
        spill = [expert for expert, wait, on_gpu in placed if wait >= 0 and not on_gpu]
        return priced(problem, fetch, spill, pipelined=True)


def overlapped_optimal_seconds(problem: LayerProblem) -> float:
    """Return the optimum in seconds for up to 64 active experts, a lower bound for more."""
    if len(problem.experts) > MAX_EXPERTS:
        return overlapped_lower_bound(problem)
    return ExactOverlapped().assign(problem).seconds


def overlapped_lower_bound(problem: LayerProblem) -> float:
    """Return a lower bound on the seconds of every split.

    In the bound, residents may be divided between the processors. With n fetches, the n absent
    experts that are slowest on the CPU are taken from it, and the GPU runs the n absent experts
    that are fastest on the GPU.
    """
    everything = priced(problem, *_all_on_gpu(problem), pipelined=True)
    search = _Search(problem, float("inf"))
    bound = search.rest(0).bound(Partial.start(problem.cpu_first), problem)
    return min(everything.seconds, float(bound[0]))


def _copy_order(problem: LayerProblem) -> list[int]:
    absent = [i for i, wait in enumerate(problem.wait) if wait < 0]
    return sorted(absent, key=lambda i: -problem.gpu[i])


def _all_on_gpu(problem: LayerProblem) -> tuple[list[int], list[int]]:
    return [problem.experts[i] for i in _copy_order(problem)], []


class _Rest:
    """Bounds the time that undecided experts, `residents` and `absent`, add to partial answers."""

    def __init__(self, problem: LayerProblem, residents: Sequence[int], absent: Sequence[int]):
        cpu, gpu = np.array(problem.cpu), np.array(problem.gpu)
        self._residents = Relaxation(cpu[list(residents)], gpu[list(residents)])
        slowest_first = np.sort(cpu[list(absent)])[::-1]
        quickest_first = np.sort(gpu[list(absent)])
        # By number of fetches among them.
        self._cpu = cpu[list(absent)].sum() - np.concatenate(([0.0], np.cumsum(slowest_first)))
        self._cpu[-1] = 0.0
        self._gpu = np.concatenate(([0.0], np.cumsum(quickest_first)))

    def bound(self, partial: Partial, problem: LayerProblem) -> Floats:
        """Return for each partial answer a lower bound on the seconds of all its completions."""
        least = np.full(len(partial.gpu), np.inf)
        for count, (cpu, gpu) in enumerate(zip(self._cpu, self._gpu, strict=True)):
            fetches = partial.fetches + count
            slowdown = _least_slowdown(problem, int(fetches.min(initial=MAX_EXPERTS)))
            bound = self._residents.bound(partial.cpu + cpu, partial.gpu + gpu, slowdown)
            bound = np.maximum(bound, _slowed(problem, partial.cpu + cpu, fetches))
            if count:
                arrival = problem.link_busy + fetches * problem.link
                bound = np.maximum(bound, arrival + self._gpu[1])
            bound[fetches > problem.max_fetches] = np.inf
            least = np.minimum(least, bound)
        return least


def _slowed(problem: LayerProblem, cpu: Floats, fetches: Ints) -> Floats:
    """Return the CPU seconds `cpu`, slowed by simultaneous copies as in `pipeline_seconds`."""
    arrival = problem.link_busy + fetches * problem.link
    slowed: Floats = cpu + (problem.cpu_slowdown - 1.0) * np.minimum(cpu, arrival)
    return slowed


def _least_slowdown(problem: LayerProblem, fetches: int) -> float:
    """Return the least factor by which `fetches` copies slow the CPU, for any experts it computes.

    `_slowed` is concave in the CPU's seconds, so the factor is least if the CPU computes all
    experts.
    """
    most = sum(problem.cpu) + problem.cpu_first
    arrival = problem.link_busy + fetches * problem.link
    return 1.0 + (problem.cpu_slowdown - 1.0) * (min(1.0, arrival / most) if most else 0.0)


class _Search:
    """Branches on one expert after another; finds only answers with an expert on the CPU."""

    def __init__(self, problem: LayerProblem, best: float) -> None:
        self._problem = problem
        self._best = best
        wait = problem.wait
        residents = [i for i, seconds in enumerate(wait) if seconds >= 0]
        self._residents = sorted(residents, key=wait.__getitem__)
        self._absent = _copy_order(problem)

    def rest(self, decided: int) -> _Rest:
        """Return the `_Rest` of the experts that are undecided after `decided` decisions."""
        known = min(decided, len(self._residents))
        return _Rest(
            self._problem, self._residents[known:], self._absent[max(0, decided - known) :]
        )

    def run(self) -> list[bool] | None:
        """Return which experts the best answer puts on the GPU; None if none beats `best`."""
        partial = Partial.start(self._problem.cpu_first)
        order = self._residents + self._absent
        for decided, i in enumerate(order, 1):
            partial = self._branch(partial, i)
            partial = partial.pruned(self.rest(decided).bound(partial, self._problem), self._best)
        return partial.best(_slowed(self._problem, partial.cpu, partial.fetches), len(order))

    def _branch(self, partial: Partial, i: int) -> Partial:
        """Return the partial answers with expert i on the CPU, and those with it on the GPU."""
        problem, on_gpu = self._problem, partial
        ready = problem.wait[i]
        arrival = np.full(len(partial.gpu), ready)
        if ready < 0:
            on_gpu = partial.keep(np.flatnonzero(partial.fetches < problem.max_fetches))
            arrival = problem.link_busy + (on_gpu.fetches + 1) * problem.link
        gpu = np.maximum(on_gpu.gpu, arrival) + problem.gpu[i]
        return partial.branched(i, problem.cpu[i], on_gpu, gpu, int(ready < 0))
