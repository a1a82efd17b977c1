"""CPU, GPU and link on a virtual clock: the time of a plan when they work in parallel.

A layer is its dense part on the GPU, then the plan: residents run on the GPU, fetched experts after
their copies, and the CPU works beside; the layer ends when both are done. In a step in one graph,
the plan begins after the answer of the next layer's router if that is run ahead; fetched experts
run last, in a launch of their own; and copies that are inserted begin after the CPU's share. The
link serves copies one after another, also across layers. While CPU and link work at the same time,
each slows the other down by the profile's factors.

With memory over a disk, the disk reads absent experts one after another. A layer's experts for the
CPU come first; the CPU computes them as they arrive, after its other experts. Experts to be copied
come next; each copy waits for its read.
"""

from collections import deque
from collections.abc import Iterator
from typing import NamedTuple, Protocol

from tandem.policy.cost import CostTable, HardwareProfile, ShapeCosts
from tandem.policy.plan import TWICE, Copy, LayerLoad, LayerPlan


class Arrival(NamedTuple):
    """An expert's copy, and the time in seconds at which it ends."""

    layer: int
    expert: int
    seconds: float


class Memory(Protocol):
    """Host memory that has only some experts; the disk has all."""

    read_seconds: float  # per expert

    def has(self, layer: int, expert: int) -> bool:
        """Tell whether an expert is in memory."""


class _GpuQueue:
    """The GPU's work in one layer: while it would wait for a copy, it runs residents."""

    def __init__(self, now: float, resident_seconds: float) -> None:
        self.end, self.left, self.busy = now, resident_seconds, resident_seconds

    def run(self, seconds: float, arrival: float) -> float:
        """Run an expert whose copy ends at `arrival`; return when the expert is computed."""
        if arrival > self.end:
            self.left -= min(self.left, arrival - self.end)
            self.end = arrival
        self.end += seconds
        self.busy += seconds
        return self.end


class Timeline:
    """The clock of CPU, GPU and link; `now` is when all layers run so far are done."""

    def __init__(
        self, profile: HardwareProfile, shape: ShapeCosts, memory: Memory | None = None
    ) -> None:
        """Start at time 0 with everything idle; without `memory`, nothing is read from a disk."""
        self.now = 0.0
        self.costs = CostTable(shape)
        self.cpu_busy = self.gpu_busy = self.link_busy = 0.0
        self.watchers = 0  # a virtual clock always counts busy times
        self._cpu_slowdown = profile.cpu_slowdown_while_copying
        self._link_slowdown = profile.link_slowdown_while_computing
        self._link_free = self._disk_free = 0.0
        self.num_reads = 0
        self._come: dict[tuple[int, int], float] = {}  # when this layer's reads end
        self._memory = memory
        self._dense = (1, self.costs.dense(1))  # (tokens, seconds) of the latest query
        self._under_way: deque[Arrival] = deque()

    def run_dense(self, num_tokens: int) -> None:
        """Run attention, router and shared experts of a layer."""
        if num_tokens != self._dense[0]:
            self._dense = num_tokens, self.costs.dense(num_tokens)
        seconds = self._dense[1]
        self.now += seconds
        self.gpu_busy += seconds

    def arrivals(self) -> Iterator[Arrival]:
        """Yield the copies that have ended by now, each once."""
        under_way = self._under_way
        while under_way and under_way[0].seconds <= self.now:
            yield under_way.popleft()

    def issue(self, copies: tuple[Copy, ...]) -> None:
        """Queue copies that no layer waits for, while the CPU is idle."""
        for copy in copies:
            self._copy(copy, 0.0, 0.0)

    def run(self, load: LayerLoad, plan: LayerPlan) -> None:
        """Run the experts of one layer; afterwards `now` is the end of the layer."""
        costs = self.costs
        costs.require(max(load.tokens))
        tokens = dict(zip(load.experts, load.tokens, strict=True))
        start = self.now
        self._come.clear()
        read = [(e, self._read(plan.layer, e)) for e in self._absent(plan, tokens)]
        coming = [expert for expert, _ in read]
        cpu = sum([costs.cpu[tokens[expert]] for expert in plan.cpu if expert not in coming])
        first = costs.cpu_first if plan.launches else costs.planned_first
        cpu += first if plan.cpu else 0.0
        if plan.launches:
            self.now += costs.asking if plan.asks else 0.0
            return self._run_in_graph(plan, tokens, cpu, read)
        gpu_end = self._run_gpu(plan, tokens, start + cpu)
        for copy in (*plan.insert, *plan.prefetch):
            self._copy(copy, 0.0, start + cpu)
        shared = min(cpu, max(0.0, self._link_free - start))
        cpu += shared * (self._cpu_slowdown - 1.0)
        self.now = max(self._run_cpu(start + cpu, cpu, tokens, read), gpu_end)

    def _absent(self, plan: LayerPlan, tokens: dict[int, int]) -> list[int]:
        """Return the CPU's experts that memory lacks, in the order of their reads."""
        if self._memory is None:
            return []
        absent = [expert for expert in plan.cpu if not self._memory.has(plan.layer, expert)]
        return sorted(absent, key=lambda expert: -tokens[expert])

    def _read(self, layer: int, expert: int) -> float:
        """Return when an expert will be in memory, 0 if it already is; queue its read if needed."""
        memory, key = self._memory, (layer, expert)
        if memory is None or memory.has(layer, expert):
            return 0.0
        if key not in self._come:
            self._disk_free = max(self._disk_free, self.now) + memory.read_seconds
            self.num_reads += 1
            self._come[key] = self._disk_free
        return self._come[key]

    def _run_cpu(
        self, done: float, cpu: float, tokens: dict[int, int], read: list[tuple[int, float]]
    ) -> float:
        """Compute the CPU's experts; return when the CPU is done.

        Experts that are in memory take `cpu` seconds and end at `done`. Then come the `read`
        experts (expert, end of its read), each not before it has been read.
        """
        self.cpu_busy += cpu
        for expert, arrival in read:
            seconds, begin = self.costs.cpu[tokens[expert]], max(done, arrival)
            shared = min(seconds, max(0.0, self._link_free - begin))
            seconds += shared * (self._cpu_slowdown - 1.0)
            self.cpu_busy += seconds
            done = begin + seconds
        return done

    def _run_in_graph(
        self,
        plan: LayerPlan,
        tokens: dict[int, int],
        cpu: float,
        read: list[tuple[int, float]],
    ) -> None:
        """Run a layer of a step in one graph; copies wait until the copying thread is awake."""
        gpu, wake, start = self.costs.gpu, self.costs.copy_wake, self.now
        held = sum([gpu[tokens[expert]] for expert in plan.gpu])
        fetched, landed = 0.0, start
        for copy in plan.fetch:
            landed = self._copy(copy, start + wake, start + cpu) + wake
            fetched += gpu[tokens[copy.expert]]
        for copy in plan.prefetch:
            self._copy(copy, start + wake, start + cpu)
        cpu += min(cpu, max(0.0, self._link_free - start)) * (self._cpu_slowdown - 1.0)
        answered = max(self._run_cpu(start + cpu, cpu, tokens, read), landed)
        for copy in plan.insert:
            self._copy(copy, answered + wake, start)
        self.gpu_busy += held + fetched
        self.now = max(start + held, answered)
        if plan.launches == TWICE:
            self.now += self.costs.second_launch + fetched

    def _run_gpu(self, plan: LayerPlan, tokens: dict[int, int], cpu_end: float) -> float:
        gpu = self.costs.gpu
        queue = _GpuQueue(self.now, sum([gpu[tokens[expert]] for expert in plan.gpu]))
        if plan.arriving:
            for arrival in self._under_way:
                if arrival.layer == plan.layer and arrival.expert in plan.arriving:
                    queue.run(gpu[tokens[arrival.expert]], arrival.seconds)
        slot_free: dict[int, float] = {}
        for copy in plan.fetch:
            arrival_seconds = self._copy(copy, slot_free.get(copy.slot, 0.0), cpu_end)
            slot_free[copy.slot] = queue.run(gpu[tokens[copy.expert]], arrival_seconds)
        self.gpu_busy += queue.busy
        return queue.end + queue.left

    def _copy(self, copy: Copy, slot_free: float, cpu_end: float) -> float:
        """Queue a copy behind the link's earlier copies; return when it ends.

        The copy begins once the slot is free, and takes longer if it begins before `cpu_end`, while
        the CPU works.
        """
        arrived = self._read(copy.layer, copy.expert)
        start = max(self._link_free, self.now, slot_free, arrived)
        seconds = self.costs.link
        if start < cpu_end:
            seconds *= self._link_slowdown
        self._link_free = start + seconds
        self.link_busy += seconds
        self._under_way.append(Arrival(copy.layer, copy.expert, self._link_free))
        return self._link_free
