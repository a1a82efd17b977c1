"""Tandem's own assignment: the best of all (fetches, spills) counts, with copies in a pipeline.

Absent experts are ranked by CPU seconds, resident ones by CPU seconds per GPU second. The GPU
fetches the first x absent ones and gives the last y resident ones to the CPU. Where GPU time does
not depend on the token count (weights are read once), no other choice of x + y experts is better,
so the best pair is the optimum; a pointer in y only moves forward as x grows, so it costs
O(n log n). All-CPU is among the pairs: the answer is never worse.
"""

from bisect import insort
from collections.abc import Sequence

from tandem.policy.assignment.problem import LayerProblem, Split, added


class Balanced:
    """Compares every number of fetches with every number of spills."""

    def __init__(self, *, pipelined: bool = True) -> None:
        """Minimise the pipeline's time, or the paper's equations 3 to 9."""
        self.pipelined = pipelined

    def assign(self, problem: LayerProblem) -> Split:
        """Return the best split; ties fetch the expert with the higher cache score."""
        wait, cpu, scores = problem.wait, problem.cpu, problem.scores
        absent = [i for i, seconds in enumerate(wait) if seconds < 0]
        resident = [i for i, seconds in enumerate(wait) if seconds >= 0]
        absent.sort(key=lambda i: (-cpu[i], -scores[i]))
        gpu_fetched, arrival = self._fetch_seconds(problem, absent)
        by_ratio, held_left, floor = self._resident_seconds(problem, resident)
        spilled = [0.0]
        for i in by_ratio:
            spilled.append(spilled[-1] + cpu[i])
        fetch, spill, gpu_seconds, cpu_seconds = self._best_pair(
            problem, [cpu[i] for i in absent], gpu_fetched, arrival, held_left, floor, spilled
        )
        if self.pipelined and problem.link_slowdown > 1.0 and len(gpu_fetched) > len(absent):
            # Without the CPU copies are as fast as the link alone.
            alone = problem._replace(link=problem.link / problem.link_slowdown)
            total, done = self._fetch_seconds(alone, absent)
            everything = max(max(held_left[0], floor[0]) + total[-1], done[-1])
            if everything < max(gpu_seconds, cpu_seconds):
                fetch, spill, gpu_seconds, cpu_seconds = len(absent), 0, everything, 0.0
        experts = problem.experts
        return Split(
            [experts[i] for i in absent[:fetch]],
            [experts[i] for i in by_ratio[:spill]],
            gpu_seconds,
            cpu_seconds,
        )

    def _resident_seconds(
        self, problem: LayerProblem, resident: Sequence[int]
    ) -> tuple[list[int], list[float], list[float]]:
        """Return residents in spill order; per number of spills GPU seconds, end of arrivals."""
        wait, cpu, gpu = problem.wait, problem.cpu, problem.gpu
        held = {i: gpu[i] if gpu[i] > wait[i] else wait[i] for i in resident}
        order = sorted(resident, key=lambda i: cpu[i] / held[i] if held[i] else 1e99)
        left, floor = [0.0], [0.0]
        under_way: list[tuple[float, float]] = []  # (arrival, GPU seconds) of copies, by arrival
        for i in reversed(order):
            if not self.pipelined:
                left.append(left[-1] + held[i])
                floor.append(0.0)
                continue
            left.append(left[-1] + gpu[i])
            if wait[i]:
                insort(under_way, (wait[i], gpu[i]))
                floor.append(_one_after_another(under_way))
            else:
                floor.append(floor[-1])
        return order, left[::-1], floor[::-1]

    def _fetch_seconds(
        self, problem: LayerProblem, absent: Sequence[int]
    ) -> tuple[list[float], list[float]]:
        """Return per number of fetches the fetched experts' GPU seconds, and the last one's end."""
        limit = min(len(absent), problem.max_fetches)
        gpu, link = problem.gpu, problem.link
        total, done = [0.0], [0.0]
        for count, i in enumerate(absent[:limit], 1):
            seconds = gpu[i]
            if self.pipelined:
                arrived = problem.link_busy + count * link
                done.append((arrived if arrived > done[-1] else done[-1]) + seconds)
            else:
                seconds = seconds if seconds > link else link
                done.append(0.0)
            total.append(total[-1] + seconds)
        return total, done

    def _best_pair(
        self,
        problem: LayerProblem,
        cpu_absent: Sequence[float],
        gpu_fetched: Sequence[float],
        arrival: Sequence[float],
        held_left: Sequence[float],
        floor: Sequence[float],
        spilled: Sequence[float],
    ) -> tuple[int, int, float, float]:
        """Return (fetches, spills, gpu, cpu seconds) with the least maximum of both times."""
        surcharge = problem.cpu_first if self.pipelined else 0.0
        slower = problem.cpu_slowdown - 1.0 if self.pipelined else 0.0
        last = len(held_left) - 1
        left = added(cpu_absent)
        best, best_seconds = (0, last, 0.0, left + spilled[last] + surcharge), float("inf")
        spill = 0
        for fetch, total in enumerate(gpu_fetched):
            if fetch:
                left -= cpu_absent[fetch - 1]
            if fetch == len(cpu_absent):
                left = 0.0
            while True:
                gpu = max(max(held_left[spill], floor[spill]) + total, arrival[fetch])
                on_cpu = spill or fetch < len(cpu_absent)
                cpu = left + spilled[spill] + surcharge if on_cpu else 0.0
                cpu += slower * min(cpu, problem.link_busy + fetch * problem.link)
                seconds = gpu if gpu > cpu else cpu
                if seconds < best_seconds:
                    best, best_seconds = (fetch, spill, gpu, cpu), seconds
                if cpu >= gpu or spill == last:
                    break
                spill += 1
            if spill:
                spill -= 1
            if gpu_fetched[fetch] >= best_seconds or arrival[fetch] >= best_seconds:
                break
        return best


def _one_after_another(arrivals: Sequence[tuple[float, float]]) -> float:
    """Return when experts that arrive at these times end, if the GPU computes nothing else."""
    done = 0.0
    for arrival, seconds in arrivals:
        done = (arrival if arrival > done else done) + seconds
    return done
