"""Tandem's own assignment: the best numbers of fetches and spills, with copies in a pipeline.

Absent experts are ranked by CPU seconds, resident experts by CPU seconds per GPU second. The GPU
fetches the first x absent experts and gives the last y resident experts to the CPU (spills them).
Where GPU time does not depend on the token count (weights are read once), no other choice of x + y
experts is better, so the best pair (x, y) is the optimum. The best y only grows with x, so the
search costs O(n log n). All experts on the CPU is one of the pairs, so the answer is never worse
than the CPU alone.

If absent experts must first be read from a disk, every number of fetches among them is tried with
each pair. The CPU computes the unfetched experts as they are read, and the copy of a fetched expert
waits for its read. Residents that are not in memory stay on the GPU.
"""

from bisect import insort
from collections.abc import Sequence
from typing import NamedTuple

from tandem.policy.assignment.problem import LayerProblem, Split, added, computed_as_read


class _Read(NamedTuple):
    """The times that disk reads add to a layer if the GPU fetches `fetch` experts from the disk."""

    fetch: int
    is_cpus: bool  # whether the CPU computes any of them
    cpu_seconds: float
    cpu_done: float  # when the CPU has computed them, if it has nothing else
    gpu_seconds: float = 0.0
    # Time from the end of other copies until the last is done, if reads are early.
    after_link: float = float("-inf")
    after_reads: float = float("-inf")  # when the last is done, if there are no other copies

    @classmethod
    def of(cls, problem: LayerProblem, on_disk: Sequence[int], fetch: int, link: float) -> "_Read":
        """Return the times if the GPU fetches the first `fetch` experts of `on_disk`.

        The CPU computes the other experts of `on_disk`, which are read first. `link` is the seconds
        of one copy.
        """
        left, total, copied = on_disk[fetch:], 0.0, 0.0
        after_link = after_reads = float("-inf")
        end = arrived = added(problem.read for _ in left)
        for i in on_disk[:fetch]:
            seconds = problem.gpu[i]
            end += problem.read
            copied += link
            arrived = max(arrived, end) + link
            after_link = max(after_link, copied) + seconds
            after_reads = max(after_reads, arrived) + seconds
            total += seconds
        on_cpu = computed_as_read(problem, left)
        return cls(fetch, bool(left), *on_cpu, total, after_link, after_reads)

    def copied(self, problem: LayerProblem, link: float, others: int, done: float) -> float:
        """Return when the GPU has computed all fetched experts.

        `others` more experts are fetched from memory and copied first; the GPU has computed them at
        `done`.
        """
        busy = problem.link_busy + others * link
        return max(done + self.gpu_seconds, busy + self.after_link, self.after_reads)


class _Residents(NamedTuple):
    """Resident experts in the order of spilling; other lists are indexed by number of spills.

    `spilled` ends before the first expert that is not in memory.
    """

    order: list[int]
    left: list[float]  # GPU seconds that are left
    floor: list[float]  # the end of arrivals
    spilled: list[float]  # CPU seconds


class _Pair(NamedTuple):
    """Numbers of fetches from memory, fetches from the disk, and spills; with both end times."""

    fetch: int
    read: int
    spill: int
    gpu_seconds: float
    cpu_seconds: float

    @property
    def seconds(self) -> float:
        return max(self.gpu_seconds, self.cpu_seconds)


class Balanced:
    """Chooses the numbers of fetches and spills for which the later processor ends soonest."""

    def __init__(self, *, pipelined: bool = True) -> None:
        """Choose the cost model: the pipeline's if `pipelined`, else DALI's equations 3 to 9."""
        self.pipelined = pipelined

    def assign(self, problem: LayerProblem) -> Split:
        """Return the best split; fetches are by descending CPU seconds, then descending score."""
        wait, cpu, scores = problem.wait, problem.cpu, problem.scores
        order = sorted(range(len(wait)), key=lambda i: (-cpu[i], -scores[i]))
        absent = [i for i in order if wait[i] < 0]
        on_disk = [i for i in absent if self.pipelined and problem.is_on_disk(i)]
        absent = [i for i in absent if i not in on_disk] if on_disk else absent
        residents = self._residents(problem, [i for i, seconds in enumerate(wait) if seconds >= 0])
        fetches = self._fetch_seconds(problem, absent, problem.link)
        best: _Pair | None = None
        for count in range(min(len(on_disk), problem.max_fetches) + 1):
            read = _Read.of(problem, on_disk, count, problem.link)
            found = self._best_pair(problem, [cpu[i] for i in absent], fetches, residents, read)
            best = found if best is None or found.seconds < best.seconds else best
        assert best is not None
        num_absent = len(absent) + len(on_disk)
        if self.pipelined and problem.link_slowdown > 1.0 and problem.max_fetches >= num_absent:
            # If the CPU computes nothing, copies are not slowed down.
            link = problem.link / problem.link_slowdown
            total, done = self._fetch_seconds(problem, absent, link)
            read = _Read.of(problem, on_disk, len(on_disk), link)
            held = max(residents.left[0], residents.floor[0]) + total[-1] + read.gpu_seconds
            everything = max(held, read.copied(problem, link, len(absent), done[-1]))
            if everything < best.seconds:
                best = _Pair(len(absent), len(on_disk), 0, everything, 0.0)
        experts = problem.experts
        return Split(
            [experts[i] for i in (*absent[: best.fetch], *on_disk[: best.read])],
            [experts[i] for i in residents.order[: best.spill]],
            best.gpu_seconds,
            best.cpu_seconds,
        )

    def _residents(self, problem: LayerProblem, resident: Sequence[int]) -> _Residents:
        wait, cpu, gpu = problem.wait, problem.cpu, problem.gpu
        held = {i: gpu[i] if gpu[i] > wait[i] else wait[i] for i in resident}
        order = sorted(resident, key=lambda i: cpu[i] / held[i] if held[i] else 1e99)
        if problem.places and self.pipelined:
            order.sort(key=problem.is_on_disk)
        left, floor, spilled = [0.0], [0.0], [0.0]
        # (arrival, GPU seconds) of copies, in order of arrival.
        under_way: list[tuple[float, float]] = []
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
        for i in order:
            if self.pipelined and problem.is_on_disk(i):
                break
            spilled.append(spilled[-1] + cpu[i])
        return _Residents(order, left[::-1], floor[::-1], spilled)

    def _fetch_seconds(
        self, problem: LayerProblem, absent: Sequence[int], link: float
    ) -> tuple[list[float], list[float]]:
        """Return two lists, indexed by number of fetches from memory.

        The first holds the fetched experts' total GPU seconds, the second when the GPU has computed
        them if it computes nothing else (0 if not `pipelined`).
        """
        limit = min(len(absent), problem.max_fetches)
        gpu = problem.gpu
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
        fetches: tuple[Sequence[float], Sequence[float]],
        residents: _Residents,
        read: _Read,
    ) -> _Pair:
        """Return the best `_Pair` with the disk reads `read`: the later processor ends soonest."""
        surcharge = problem.cpu_first if self.pipelined else 0.0
        slower = problem.cpu_slowdown - 1.0 if self.pipelined else 0.0
        link, (_, held_left, floor, spilled) = problem.link, residents
        last, left, spill = len(spilled) - 1, added(cpu_absent), 0
        best, least = None, float("inf")
        for fetch in range(min(len(fetches[0]), problem.max_fetches - read.fetch + 1)):
            if fetch:
                left -= cpu_absent[fetch - 1]
            if fetch == len(cpu_absent):
                left = 0.0
            total = fetches[0][fetch] + read.gpu_seconds
            arrival = read.copied(problem, link, fetch, fetches[1][fetch])
            while True:
                gpu = max(max(held_left[spill], floor[spill]) + total, arrival)
                on_cpu = spill or fetch < len(cpu_absent) or read.is_cpus
                cpu = left + spilled[spill] + surcharge if on_cpu else 0.0
                cpu += slower * min(cpu, problem.link_busy + (fetch + read.fetch) * link)
                cpu = max(cpu + read.cpu_seconds, read.cpu_done)
                seconds = gpu if gpu > cpu else cpu
                if seconds < least:
                    best, least = _Pair(fetch, read.fetch, spill, gpu, cpu), seconds
                if cpu >= gpu or spill == last:
                    break
                spill += 1
            if spill:
                spill -= 1
            if total >= least or arrival >= least:
                break
        assert best is not None
        return best


def _one_after_another(arrivals: Sequence[tuple[float, float]]) -> float:
    """Return when a GPU with only these experts, as (arrival, seconds), has computed them."""
    done = 0.0
    for arrival, seconds in arrivals:
        done = (arrival if arrival > done else done) + seconds
    return done
