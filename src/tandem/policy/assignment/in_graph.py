"""Rules for decode steps that are one graph: what the device has published as a hit stays its.

A resident is never spilled to the CPU, there is no plan without the device, and an expert whose
copy is under way is a miss. Of the misses the CPU computes some; the others are copied into staging
slots meanwhile, and a second launch computes them together, behind the hits, the CPU's share and
the last copy.

Native code decides the same, so numbers are added up one by one, in the order that is written here.
"""

from collections.abc import Sequence
from typing import NamedTuple

from tandem.policy.assignment.problem import LayerProblem, Split, added


class Published(NamedTuple):
    """A layer as a step in one graph has published it: hits, and misses by their positions."""

    held_seconds: float  # of the device, for its hits
    absent: list[int]  # misses that may be fetched
    under_way: list[int]  # misses whose copy has not ended: the CPU's

    @classmethod
    def of(cls, problem: LayerProblem) -> "Published":
        """Return what a problem's layer is to the device."""
        held, absent, under_way = 0.0, [], []
        for i, wait in enumerate(problem.wait):
            if wait == 0.0:
                held += problem.gpu[i]
            elif wait < 0.0:
                absent.append(i)
            else:
                under_way.append(i)
        return cls(held, absent, under_way)

    def split(
        self, problem: LayerProblem, fetch: Sequence[int], gpu_seconds: float, cpu_seconds: float
    ) -> Split:
        """Return the answer that fetches the misses at these positions, in this order."""
        experts = problem.experts
        spill = [experts[i] for i in self.under_way]
        return Split([experts[i] for i in fetch], spill, gpu_seconds, cpu_seconds)


def in_graph_seconds(
    problem: LayerProblem, layer: Published, fetch: Sequence[int]
) -> tuple[float, float]:
    """Return when device and CPU are done if the misses at these positions are fetched."""
    left = [*layer.under_way, *(i for i in layer.absent if i not in fetch)]
    link = problem.link if left else problem.link / problem.link_slowdown
    arrived, gpu, cpu = problem.link_busy, layer.held_seconds, 0.0
    if fetch:
        arrived = max(arrived, problem.copy_wake)
    for _ in fetch:
        arrived += link
    if left:
        cpu = added(problem.cpu[i] for i in left) + problem.cpu_first
        cpu += (problem.cpu_slowdown - 1.0) * min(cpu, arrived)
    if fetch:
        gpu = max(gpu, cpu, arrived + problem.copy_wake)
    for i in fetch:
        gpu += problem.gpu[i]
    return gpu, cpu


class ReadyOnGpu:
    """The device computes what it has when the layer runs, the CPU every miss: nothing is fetched.

    It prices no copies that are under way for other layers.
    """

    pipelined = True

    def assign(self, problem: LayerProblem) -> Split:
        """Return the split by residency alone."""
        gpu = cpu = 0.0
        spill = []
        for i, wait in enumerate(problem.wait):
            if wait == 0.0:
                gpu += problem.gpu[i]
                continue
            cpu += problem.cpu[i]
            if wait > 0.0:
                spill.append(problem.experts[i])
        if any(problem.wait):
            cpu += problem.cpu_first
        return Split((), spill, gpu, cpu)


class BalancedInGraph:
    """`balanced` without spills: the number of fetches with which both are done first."""

    pipelined = True

    def assign(self, problem: LayerProblem) -> Split:
        """Return the best split: the CPU's longest misses are fetched, among equals the valued."""
        layer, cpu, scores = Published.of(problem), problem.cpu, problem.scores
        order = sorted(layer.absent, key=lambda i: (-cpu[i], -scores[i]))
        best, least = order[:0], in_graph_seconds(problem, layer, ())
        for count in range(1, min(len(order), problem.max_fetches) + 1):
            seconds = in_graph_seconds(problem, layer, order[:count])
            if max(seconds) < max(least):
                best, least = order[:count], seconds
        return layer.split(problem, best, *least)


class DaliInGraph:
    """DALI's Algorithm 1 over the misses: each, by |t_gpu - t_cpu|, to who finishes sooner."""

    pipelined = False

    def assign(self, problem: LayerProblem) -> Split:
        """Return its answer, with the hits in the device's total before it begins."""
        layer, cpu, link = Published.of(problem), problem.cpu, problem.link
        on_gpu, on_cpu = layer.held_seconds, added(cpu[i] for i in layer.under_way)
        gpu = [seconds if seconds > link else link for seconds in problem.gpu]
        fetch: list[int] = []
        for i in sorted(layer.absent, key=lambda i: -abs(gpu[i] - cpu[i])):
            if len(fetch) < problem.max_fetches and on_gpu + gpu[i] <= on_cpu + cpu[i]:
                fetch.append(i)
                on_gpu += gpu[i]
            else:
                on_cpu += cpu[i]
        return layer.split(problem, fetch, on_gpu, on_cpu)
