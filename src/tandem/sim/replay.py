"""Replays a routing trace through a planner on a virtual clock, and sums up what happened."""

import dataclasses
import functools
import time
from collections.abc import Callable, Iterable
from statistics import median
from typing import NamedTuple

from tandem.policy.assignment import Assignment
from tandem.policy.assignment.problem import (
    LayerProblem,
    Split,
    equation_seconds,
    pipeline_seconds,
)
from tandem.policy.cost import HardwareProfile, ShapeCosts
from tandem.policy.plan import LayerLoad, LayerPlan
from tandem.policy.settings import Native, PlannerSettings, make_planner_on
from tandem.policy.speculation.step_shape import TouchedExperts
from tandem.policy.step_path import MAX_GRAPH_TOKENS
from tandem.sim.disk import HostShare, HostTier
from tandem.sim.exact import optimal_seconds
from tandem.sim.exact_overlapped import overlapped_optimal_seconds
from tandem.sim.speculation import SpeculationChoice, TraceSpeculation
from tandem.sim.steps import LoadReader, Step, replay_steps
from tandem.sim.timeline import Timeline
from tandem.trace import RoutingTrace


class Compared(NamedTuple):
    """One layer's problem, the policy's split under equations 3 to 9, and the optimum's time."""

    problem: LayerProblem
    split: Split
    optimal_seconds: float | None  # None: not computed


# Called with the step, the load, the plan, its comparison, the layer's eviction rule, and seconds.
Watch = Callable[[int, LayerLoad, LayerPlan, Compared, str, float], None]
# One layer in so many is compared with the exact optimum. The number is prime, so that all layers
# have their turn.
COMPARE_EVERY = 31


@dataclasses.dataclass(slots=True)
class Tally:
    """The totals of a replay.

    Three lists have, for each compared layer, by what share a time exceeds an optimum. In
    `over_optimal` the time is that of the policy's answer under equations 3 to 9, in
    `executed_over_optimal` that of the executed plan; both are compared with the optimum of these
    equations. In `overlapped_over_optimal` the executed plan is compared with the optimum for
    overlapped copies, and both times are `pipeline_seconds`.
    """

    tokens: int = 0
    steps: int = 0
    decode_tokens: int = 0
    decode_seconds: float = 0.0
    prefill_tokens: int = 0
    prefill_seconds: float = 0.0
    demands: int = 0  # active experts
    hits: int = 0  # demands that were resident and ready when planned
    copies: int = 0
    reads: int = 0  # experts read from a disk
    prefetch_issued: int = 0
    prefetch_useful: int = 0
    decode_steps: int = 0
    drafted: int = 0  # tokens that decode steps verified
    accepted: int = 0
    cpu_busy_seconds: float = 0.0
    gpu_busy_seconds: float = 0.0
    link_busy_seconds: float = 0.0
    total_seconds: float = 0.0
    plan_seconds: list[float] = dataclasses.field(default_factory=list)
    learn_seconds: list[float] = dataclasses.field(default_factory=list)
    over_optimal: list[float] = dataclasses.field(default_factory=list)
    executed_over_optimal: list[float] = dataclasses.field(default_factory=list)
    overlapped_over_optimal: list[float] = dataclasses.field(default_factory=list)

    def decode_tokens_per_second(self) -> float:
        """Return the decode speed of all sequences together; 0 without decode steps."""
        return self.decode_tokens / self.decode_seconds if self.decode_seconds else 0.0

    def prefill_tokens_per_second(self) -> float | None:
        """Return the prefill speed; None without prefills."""
        return self.prefill_tokens / self.prefill_seconds if self.prefill_seconds else None

    def plan_microseconds(self) -> dict[str, float]:
        """Return the median and p99 time of making one plan on this machine.

        `learning_median` is the median time of learning from a layer; in real runs that happens
        while CPU and GPU compute the layer.
        """
        times = sorted(self.plan_seconds) or [0.0]
        at = min(len(times) - 1, int(0.99 * len(times)))
        return {
            "median": median(times) * 1e6,
            "p99": times[at] * 1e6,
            "learning_median": median(self.learn_seconds or [0.0]) * 1e6,
        }


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ReplaySettings:
    """The conditions of one replay."""

    settings: PlannerSettings
    profile: HardwareProfile
    shape: ShapeCosts
    num_slots: int
    batch: int = 1
    prompt: int | None = 16  # tokens of a sequence that run at once; None: as recorded
    limit: int = 1 << 60
    compare_every: int = COMPARE_EVERY  # 0: never
    speculation: SpeculationChoice | None = None
    memory: HostShare | None = None  # over the profile's disk; None: memory has all experts
    in_graph: bool = False  # whether small decode steps are one graph
    # Tables in which policies learn; None: slow ones that give the same answers.
    tables: Native | None = None


def replay(
    trace: RoutingTrace,
    run: ReplaySettings,
    *,
    resident: Iterable[int] = (),
    watch: Watch | None = None,
    progress: Callable[[int], None] | None = None,
    clock: Timeline | None = None,
) -> Tally:
    """Replay a trace until it ends or the limit is reached; return the totals.

    The experts `resident` (keys) are in the cache at first. `progress` gets the number of tokens of
    each step. A `clock`, such as a more accurate timeline, replaces the usual timeline.
    """
    return _Replay(trace, run, resident, watch, clock).run(progress)


class _Replay:
    """One replay: a planner, its clock, and the loop over steps and layers."""

    def __init__(
        self,
        trace: RoutingTrace,
        run: ReplaySettings,
        resident: Iterable[int],
        watch: Watch | None,
        clock: Timeline | None,
    ) -> None:
        profile = run.profile
        self._settings = run
        self._trace = trace
        self._reader = LoadReader(trace)
        self._planner = make_planner_on(
            profile,
            run.shape,
            run.settings,
            trace.meta.geometry,
            run.num_slots,
            resident=resident,
            tables=run.tables,
        )
        self._memory: HostTier | None = None
        if run.memory is not None:
            states, read_seconds = self._planner.residency.state, self._planner.costs.read
            self._memory = HostTier(trace.meta.geometry, run.memory, states, read_seconds)
        self._timeline = clock or Timeline(profile, run.shape, self._memory)
        self._by_equations = functools.cache(functools.partial(_by_equations, run.settings))
        self._graph_tokens = 0  # tokens of the current step; 0 if it is planned
        self._watch = watch
        self._touched = TouchedExperts(lambda: self._planner)
        self._decoding = (
            None
            if run.speculation is None
            else TraceSpeculation(trace, run.speculation, self._timeline, self._touched)
        )
        self._tally = Tally()
        self._ahead: set[tuple[int, int]] = set()
        self._countdown = run.compare_every

    def run(self, progress: Callable[[int], None] | None) -> Tally:
        tally, timeline = self._tally, self._timeline
        run, before = self._settings, timeline.now
        for step in replay_steps(self._trace, run.batch, run.prompt, self._decoding):
            self._step(step)
            seconds, count = timeline.now - before, step.num_new
            before = timeline.now
            tally.steps += 1
            tally.tokens += count
            if step.is_prefill:
                tally.prefill_tokens += count
                tally.prefill_seconds += seconds
            else:
                tally.decode_steps += 1
                tally.decode_tokens += count
                tally.decode_seconds += seconds
            if progress is not None:
                progress(count)
            if tally.tokens >= run.limit:
                break
        if self._decoding is not None:
            tally.drafted, tally.accepted = self._decoding.drafted, self._decoding.accepted
        tally.total_seconds, tally.reads = timeline.now, timeline.num_reads
        tally.cpu_busy_seconds = timeline.cpu_busy
        tally.gpu_busy_seconds = timeline.gpu_busy
        tally.link_busy_seconds = timeline.link_busy
        return tally

    def _step(self, step: Step) -> None:
        planner, timeline, reader, tally = self._planner, self._timeline, self._reader, self._tally
        count = len(step.tokens)
        hints = reader.hints(step) if self._trace.predicted is not None else None
        loads = reader.loads(step)
        is_short = not step.is_prefill and count <= MAX_GRAPH_TOKENS
        self._graph_tokens = count if self._settings.in_graph and is_short else 0
        ahead = planner.begin_step(
            count, timeline.now, token_ids=reader.token_ids(step), is_prefill=step.is_prefill,
            in_graph=self._graph_tokens > 0, known=reader.known(loads),
        )  # fmt: skip
        timeline.issue(ahead)
        memory = self._memory
        if memory is not None:
            memory.begin_step(is_prefill=step.is_prefill)
        for copy in ahead:
            self._ahead.add((copy.layer, copy.expert))
            tally.prefetch_issued += 1
            tally.copies += 1
        for load in loads:
            timeline.run_dense(count)
            for arrival in timeline.arrivals():
                planner.copy_finished(*arrival)
            if self._decoding is not None:
                self._touched.observe(load)
            known = hints[load.layer + 1] if hints and load.layer + 1 < len(hints) else ()
            compared = self._compare(load)
            start = time.perf_counter()
            places = memory.places(load) if memory is not None else b""
            plan = planner.plan(load, timeline.now, known, places)
            planned = time.perf_counter()
            planner.learn()
            tally.plan_seconds.append(planned - start)
            tally.learn_seconds.append(time.perf_counter() - planned)
            if compared is not None:
                self._judge(compared, load, plan)
                if self._watch is not None:
                    rule = planner.eviction.rule(load.layer)
                    self._watch(tally.steps, load, plan, compared, rule, timeline.now)
            self._count(load, plan)
            timeline.run(load, plan)
            if memory is not None:
                memory.use(load, plan)

    def _compare(self, load: LayerLoad) -> Compared | None:
        """Return the layer's comparison if it is due or if there is a `watch`; otherwise None.

        The optimum is computed only if the comparison is due.
        """
        self._countdown -= 1
        is_due = self._settings.compare_every > 0 and self._countdown < 0
        if self._watch is None and not is_due:
            return None
        problem = self._planner.problem(load, self._timeline.now)
        split = self._by_equations(self._graph_tokens).assign(problem)
        if not is_due:
            return Compared(problem, split, None)
        self._countdown = self._settings.compare_every - 1
        return Compared(problem, split, optimal_seconds(problem))

    def _judge(self, compared: Compared, load: LayerLoad, plan: LayerPlan) -> None:
        problem, split, best = compared
        if not best:
            return
        seconds = max(equation_seconds(problem, split.fetch, split.spill))
        self._tally.over_optimal.append(seconds / best - 1.0)
        fetch = [copy.expert for copy in plan.fetch]
        residents = {e for e, wait in zip(load.experts, problem.wait, strict=True) if wait >= 0}
        spill = [expert for expert in plan.cpu if expert in residents]
        seconds = max(equation_seconds(problem, fetch, spill))
        self._tally.executed_over_optimal.append(seconds / best - 1.0)
        best = overlapped_optimal_seconds(problem)
        if best:
            seconds = max(pipeline_seconds(problem, fetch, spill))
            self._tally.overlapped_over_optimal.append(seconds / best - 1.0)

    def _count(self, load: LayerLoad, plan: LayerPlan) -> None:
        tally, layer, ahead = self._tally, load.layer, self._ahead
        tally.demands += len(load.experts)
        tally.hits += plan.hits
        tally.copies += len(plan.fetch) + len(plan.insert) + len(plan.prefetch)
        if ahead:
            for expert in (*plan.gpu, *plan.arriving):
                tally.prefetch_useful += (layer, expert) in ahead
            self._ahead = ahead = {pair for pair in ahead if pair[0] != layer}
        for copy in plan.prefetch:
            ahead.add((copy.layer, copy.expert))
            tally.prefetch_issued += 1


def _by_equations(settings: PlannerSettings, graph_tokens: int) -> Assignment:
    """Return the settings' assignment; `balanced` is set to equations 3 to 9, without overlap."""
    name = settings.rule(graph_tokens=graph_tokens)
    options = {} if graph_tokens else dict(settings.assignment_options)
    if name == "balanced":
        options["pipelined"] = False
    return settings.policies.assignments.factory(name)(**options)
