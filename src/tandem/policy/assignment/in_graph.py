"""Rules for decode steps in one graph: hits that the device has published stay on the device.

A resident is never spilled to the CPU, not even if the CPU alone would be faster, and an expert
whose copy is under way is a miss. The CPU computes some of the misses. The other misses are copied
into staging slots meanwhile; a second launch computes them together once the hits, the CPU's share
and the last copy are done. Misses that must be read from a disk stay on the CPU, which computes
them last, as they arrive: copying them would only add to the wait.

Native code must make the same decisions, so numbers are added one by one, in the order given here.
"""

from collections.abc import Sequence
from typing import NamedTuple

from tandem.policy.assignment.problem import LayerProblem, Split, added
from tandem.policy.reads import IN_SLOT


class Published(NamedTuple):
    """A layer as a step in one graph has published it: the time of its hits, and its misses.

    The lists hold positions in `LayerProblem.experts`.
    """

    held_seconds: float  # the device's seconds for its hits
    absent: list[int]  # misses that may be fetched
    under_way: list[int]  # misses whose copy has not ended; the CPU computes them
    # Those of `under_way` that are in memory, which the CPU can compute at once.
    in_memory: list[int]
    coming: list[int]  # misses that pass through memory, in the disk's order of reads

    @classmethod
    def of(cls, problem: LayerProblem) -> "Published":
        """Return the layer of a problem, with its experts sorted into hits and misses."""
        held, places = 0.0, problem.places
        absent, under_way = list[int](), list[int]()
        in_memory, coming = list[int](), list[int]()
        for i, wait in enumerate(problem.wait):
            if wait == 0.0:
                held += problem.gpu[i]
                continue
            if wait > 0.0:
                under_way.append(i)
            if places and places[i] != IN_SLOT:
                coming.append(i)
            else:
                (in_memory if wait > 0.0 else absent).append(i)
        return cls(held, absent, under_way, in_memory, coming)

    def split(
        self, problem: LayerProblem, fetch: Sequence[int], gpu_seconds: float, cpu_seconds: float
    ) -> Split:
        """Return the split that fetches the misses at these positions, in this order."""
        experts = problem.experts
        spill = [experts[i] for i in self.under_way]
        return Split([experts[i] for i in fetch], spill, gpu_seconds, cpu_seconds)


def with_reads(problem: LayerProblem, layer: Published, cpu: float) -> float:
    """Return when the CPU has computed `layer.coming`; its other experts are done at `cpu`."""
    end = 0.0
    for i in layer.coming:
        if problem.is_on_disk(i):
            end += problem.read
            cpu = max(cpu, end)
        cpu += problem.cpu[i]
    return cpu


def in_graph_seconds(
    problem: LayerProblem, layer: Published, fetch: Sequence[int]
) -> tuple[float, float]:
    """Return when device and CPU are done if the misses at these positions are fetched."""
    left = [*layer.in_memory, *(i for i in layer.absent if i not in fetch)]
    is_cpu_used = bool(left or layer.coming)
    link = problem.link if is_cpu_used else problem.link / problem.link_slowdown
    arrived, gpu, cpu = problem.link_busy, layer.held_seconds, 0.0
    if fetch:
        arrived = max(arrived, problem.copy_wake)
    for _ in fetch:
        arrived += link
    if is_cpu_used:
        cpu = added(problem.cpu[i] for i in left) + problem.cpu_first
        cpu += (problem.cpu_slowdown - 1.0) * min(cpu, arrived)
        cpu = with_reads(problem, layer, cpu)
    if fetch:
        gpu = max(gpu, cpu, arrived + problem.copy_wake)
    for i in fetch:
        gpu += problem.gpu[i]
    return gpu, cpu


class ReadyOnGpu:
    """The device computes every hit, the CPU every miss; nothing is fetched.

    Copies under way for other layers do not count in the times.
    """

    pipelined = True

    def assign(self, problem: LayerProblem) -> Split:
        """Return the split by residency alone."""
        layer, cpu = Published.of(problem), 0.0
        if any(problem.wait):
            at_once = sorted([*layer.absent, *layer.in_memory])
            cpu = added(problem.cpu[i] for i in at_once) + problem.cpu_first
            cpu = with_reads(problem, layer, cpu)
        return layer.split(problem, (), layer.held_seconds, cpu)


class BalancedInGraph:
    """`balanced` without spills: as many fetches as make both processors end soonest."""

    pipelined = True

    def assign(self, problem: LayerProblem) -> Split:
        """Return the best split; fetches are by descending CPU seconds, then descending score."""
        layer, cpu, scores = Published.of(problem), problem.cpu, problem.scores
        order = sorted(layer.absent, key=lambda i: (-cpu[i], -scores[i]))
        best, least = order[:0], in_graph_seconds(problem, layer, ())
        for count in range(1, min(len(order), problem.max_fetches) + 1):
            seconds = in_graph_seconds(problem, layer, order[:count])
            if max(seconds) < max(least):
                best, least = order[:count], seconds
        return layer.split(problem, best, *least)


class DaliInGraph:
    """Assigns misses, by descending |t_gpu - t_cpu|, to the processor that would end sooner.

    This is DALI's Algorithm 1, for the misses only.
    """

    pipelined = False

    def assign(self, problem: LayerProblem) -> Split:
        """Return the algorithm's split; the device's total starts with the time of the hits."""
        layer, cpu, link = Published.of(problem), problem.cpu, problem.link
        on_gpu, on_cpu = layer.held_seconds, added(cpu[i] for i in layer.in_memory)
        on_cpu = with_reads(problem, layer, on_cpu)
        gpu = [seconds if seconds > link else link for seconds in problem.gpu]
        fetch: list[int] = []
        for i in sorted(layer.absent, key=lambda i: -abs(gpu[i] - cpu[i])):
            if len(fetch) < problem.max_fetches and on_gpu + gpu[i] <= on_cpu + cpu[i]:
                fetch.append(i)
                on_gpu += gpu[i]
            else:
                on_cpu += cpu[i]
        return layer.split(problem, fetch, on_gpu, on_cpu)
