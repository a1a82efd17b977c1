"""A virtual clock whose copies have the order of a coordinator's copying thread.

That is not the order in which they are planned (docs/decisions/0016): fetches precede all copies
that have not begun; the slot of an evicted expert is written from the next step's first doorbell
on; other copies are submitted after the layer's answer. A copy that has begun finishes first.
"""

from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

from tandem.policy.cost import HardwareProfile, ShapeCosts
from tandem.policy.plan import TWICE, Copy, LayerLoad, LayerPlan
from tandem.sim.timeline import Arrival, Timeline


class _Waiting(NamedTuple):
    copy: Copy
    submitted: float
    step: int  # from which on it may begin


class CoordinatorClock(Timeline):
    """CPU, GPU and link while captured steps are answered."""

    def __init__(self, profile: HardwareProfile, shape: ShapeCosts) -> None:
        """Start idle, between steps."""
        super().__init__(profile, shape)
        self._waiting: deque[_Waiting] = deque()
        self._step = 0
        self._first_doorbell = self._cpu_end = 0.0
        self._has_rung = False

    def issue(self, copies: tuple[Copy, ...]) -> None:
        """Begin a step, before which nothing is copied."""
        assert not copies
        self._step += 1
        self._has_rung = False

    def arrivals(self) -> Iterator[Arrival]:
        """Yield the copies that the copying thread has reported by now."""
        self._copy_waiting(self.now)
        wake = self.costs.copy_wake
        while self._under_way and self._under_way[0].seconds + wake <= self.now:
            arrival = self._under_way.popleft()
            yield arrival._replace(seconds=arrival.seconds + wake)

    def run(self, load: LayerLoad, plan: LayerPlan) -> None:
        """Answer a layer."""
        costs, tokens = self.costs, dict(zip(load.experts, load.tokens, strict=True))
        self.now += costs.asking if plan.asks else 0.0
        start, wake = self.now, costs.copy_wake
        if not self._has_rung:
            self._has_rung, self._first_doorbell = True, start
        cpu = sum([costs.cpu[tokens[expert]] for expert in plan.cpu])
        cpu += costs.cpu_first if plan.cpu else 0.0
        self._copy_waiting(start)
        landed, self._cpu_end = start, start + cpu
        for copy in plan.fetch:
            landed = self._carry(copy, max(self._link_free, start + wake)) + wake
        for copy in plan.prefetch:
            self._carry(copy, max(self._link_free, start + wake))
        self._copy_waiting(start + cpu)
        cpu += min(cpu, max(0.0, self._link_free - start)) * (self._cpu_slowdown - 1.0)
        held = sum([costs.gpu[tokens[expert]] for expert in plan.gpu])
        fetched = sum([costs.gpu[tokens[copy.expert]] for copy in plan.fetch])
        answered = max(start + cpu, landed)
        self._waiting.extend(_Waiting(copy, answered, 0) for copy in plan.insert)
        self.now = max(start + held, answered)
        if plan.launches == TWICE:
            self.now += costs.second_launch + fetched
        self.cpu_busy += cpu
        self.gpu_busy += held + fetched

    def _copy_waiting(self, until: float) -> None:
        """Begin the copies that may begin before a time."""
        while self._waiting:
            copy, ready, step = self._waiting[0]
            if step > self._step or (step == self._step and not self._has_rung):
                return
            if step == self._step:
                ready = max(ready, self._first_doorbell)
            begin = max(self._link_free, ready + self.costs.copy_wake)
            if begin >= until:
                return
            self._waiting.popleft()
            self._carry(copy, begin)

    def _carry(self, copy: Copy, begin: float) -> float:
        slowdown = self._link_slowdown if begin < self._cpu_end else 1.0
        self._link_free = begin + slowdown * self.costs.link
        self.link_busy += self._link_free - begin
        self._under_way.append(Arrival(copy.layer, copy.expert, self._link_free))
        return self._link_free
