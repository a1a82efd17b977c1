"""One simulation from options to the numbers that `tandem simulate` reports."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, TextIO

from tandem.core.config import require_range
from tandem.core.errors import ConfigError
from tandem.hardware.profiles import shape_for
from tandem.policy.cost import NO_HOST, HardwareProfile, ShapeCosts, whole_pages
from tandem.policy.settings import PlannerSettings
from tandem.policy.step_path import MAX_GRAPH_TOKENS, StepPath, step_path
from tandem.sim.disk import HostShare
from tandem.sim.dump import Dump
from tandem.sim.graph_trial import settled
from tandem.sim.hit_rate import belady_hit_rate, demand_loads, hit_rate
from tandem.sim.replay import COMPARE_EVERY, ReplaySettings, Tally, replay
from tandem.sim.speculation import SpeculationChoice
from tandem.sim.start import SIMULATED_STARTS
from tandem.trace import RoutingTrace

Progress = Callable[[int], None]
Report = dict[str, Any]  # a JSON object


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Conditions:
    """The constants of a simulation: machine, memory, batch, and how much is replayed."""

    profile: HardwareProfile
    gpu_experts: float  # fraction of all experts that the GPU has slots for
    batch: int = 1
    prompt: int = 16
    limit: int = 1 << 60
    shape: str | None = None  # None: the shape of the trace's model
    start: str = "empty"
    # Last sequences of the trace, which are not replayed; "hottest" starts from them.
    hold_out: int = 0
    compare_every: int = COMPARE_EVERY
    host_path: str | None = None  # path whose host costs are charged; None: the profile's default
    speculation: SpeculationChoice | None = None
    memory: HostShare | None = None  # over the profile's disk; None: memory has all experts

    def __post_init__(self) -> None:
        """Raise `ConfigError` for a value out of range, an unknown start or a missing disk."""
        require_range("gpu_experts", self.gpu_experts, 0.0, 1.0, what="a fraction")
        require_range("batch", self.batch, 1)
        require_range("prompt", self.prompt, 0)
        require_range("limit", self.limit, 1)
        require_range("hold_out", self.hold_out, 0)
        SIMULATED_STARTS.factory(self.start)
        if self.memory is not None and self.profile.disk is None:
            raise ConfigError(f"profile {self.profile.name!r} has no disk; expected its costs")

    def path(self, settings: PlannerSettings) -> StepPath:
        """Return the path of decode steps.

        Raises `ConfigError` if the requested path does not support the settings or the batch.
        """
        why = settings.why_planned()
        if why is None and self.batch > MAX_GRAPH_TOKENS:
            why = f"batch {self.batch}, as it has at most {MAX_GRAPH_TOKENS} tokens"
        return step_path(self.profile, self.host_path, why)

    def costs(self, trace: RoutingTrace, settings: PlannerSettings) -> ShapeCosts:
        """Return `plain_costs` with the host costs of the path of decode steps added."""
        return self.profile.charged(self.plain_costs(trace), self.path(settings).host_path)

    def settled(self, trace: RoutingTrace, settings: PlannerSettings) -> PlannerSettings:
        """Return the settings that a real run would use, with `graph_trial`'s choices.

        If layers are routed by token id, copies for their known loads use the slots that a GPU sets
        aside for prefetches in long prompts.
        """
        if trace.meta.by_token:
            settings = dataclasses.replace(settings, copies_prompts=True)
        if not self.path(settings).in_graph:
            return settings
        costs, num_slots = self.costs(trace, settings), self.num_slots(trace)
        geometry, memory = trace.meta.geometry, self.memory
        return settled(settings, self.profile, costs, geometry, num_slots, memory=memory)

    def plain_costs(self, trace: RoutingTrace) -> ShapeCosts:
        """Return the costs of the requested shape or of the trace's model, without host costs."""
        if self.shape is not None:
            return self.profile.shape(self.shape)
        return shape_for(self.profile, trace.meta.model, trace.meta.geometry)

    def num_slots(self, trace: RoutingTrace) -> int:
        """Return the number of slots on the GPU, including ring and staging slots."""
        geometry = trace.meta.geometry
        return round(self.gpu_experts * geometry.num_layers * geometry.num_experts)


def split_trace(trace: RoutingTrace, hold_out: int) -> tuple[RoutingTrace, RoutingTrace | None]:
    """Return the sequences to replay, and the last `hold_out` sequences (None for 0)."""
    if hold_out == 0:
        return trace, None
    if hold_out >= trace.num_sequences:
        raise ConfigError(
            f"hold_out is {hold_out}; expected less than {trace.num_sequences}, "
            "the sequences of the trace"
        )
    num_replayed = trace.num_sequences - hold_out
    replayed = trace.sequences(0, num_replayed)
    return replayed, trace.sequences(num_replayed, trace.num_sequences)


def run_timed(
    trace: RoutingTrace,
    settings: PlannerSettings,
    conditions: Conditions,
    *,
    dump: Dump | None = None,
    progress: Progress | None = None,
) -> Tally:
    """Replay a trace on the virtual clock, with the settings of a real run; return the totals."""
    settings = conditions.settled(trace, settings)
    return _replayed(trace, settings, conditions, dump, progress)


def _replayed(
    trace: RoutingTrace,
    settings: PlannerSettings,
    conditions: Conditions,
    dump: Dump | None,
    progress: Progress | None,
) -> Tally:
    replayed, heat = split_trace(trace, conditions.hold_out)
    num_slots = conditions.num_slots(trace)
    geometry = trace.meta.geometry
    sizes = settings.set_sizes(geometry, num_slots)
    run = ReplaySettings(
        settings=settings,
        profile=conditions.profile,
        shape=conditions.costs(trace, settings),
        num_slots=num_slots,
        batch=conditions.batch,
        prompt=conditions.prompt,
        limit=conditions.limit,
        # The optima do not model a disk.
        compare_every=conditions.compare_every if conditions.memory is None else 0,
        speculation=conditions.speculation,
        memory=conditions.memory,
        in_graph=conditions.path(settings).in_graph,
    )
    return replay(
        replayed,
        run,
        resident=SIMULATED_STARTS.factory(conditions.start)(geometry, sizes, heat),
        watch=None if dump is None else dump.plan,
        progress=progress,
    )


def hit_rates(
    trace: RoutingTrace,
    settings: PlannerSettings,
    conditions: Conditions,
    *,
    dump: Dump | None = None,
) -> dict[str, float]:
    """Return the hit rates of the settings' eviction policy, of LRU and of Belady at equal slots.

    LRU and Belady use every slot as cache; the settings' policy leaves one slot for fetches.
    Nothing is prefetched.
    """
    replayed, _ = split_trace(trace, conditions.hold_out)
    geometry, num_slots = trace.meta.geometry, conditions.num_slots(trace)
    all_slots = settings.whole_set_sizes(geometry, num_slots)
    own_slots = dataclasses.replace(settings, prefetch_count=0).set_sizes(geometry, num_slots)
    evictions = settings.policies.evictions
    make_eviction = evictions.factory(settings.eviction)
    eviction = make_eviction(geometry, **dict(settings.eviction_options))
    lru = evictions.factory("lru")(geometry)
    batch, limit = conditions.batch, conditions.limit
    watch = None if dump is None else dump.demand
    return {
        "hit_rate": hit_rate(
            demand_loads(replayed, batch, limit), geometry, own_slots, eviction, watch
        ),
        "lru_hit_rate": hit_rate(demand_loads(replayed, batch, limit), geometry, all_slots, lru),
        "belady_hit_rate": belady_hit_rate(
            demand_loads(replayed, batch, limit), geometry, all_slots
        ),
    }


def simulate(
    trace: RoutingTrace,
    settings: PlannerSettings,
    conditions: Conditions,
    *,
    dump_to: TextIO | None = None,
    progress: Progress | None = None,
) -> Report:
    """Return the report of `tandem simulate` on one trace: a JSON object.

    `dump_to`, if given, gets every decision as JSON lines.
    """
    # First, so that an unknown shape fails before a long replay.
    costs = conditions.costs(trace, settings)
    settings = conditions.settled(trace, settings)
    dump = None
    if dump_to is not None:
        dump = Dump(dump_to, trace.meta.geometry)
        dump.header(
            model=trace.meta.model,
            settings=dataclasses.asdict(settings),
            slots=conditions.num_slots(trace),
            batch=conditions.batch,
            prompt=conditions.prompt,
            costs=dataclasses.asdict(costs),
            link_slowdown_while_computing=conditions.profile.link_slowdown_while_computing,
            cpu_slowdown_while_copying=conditions.profile.cpu_slowdown_while_copying,
        )
    rates = hit_rates(trace, settings, conditions, dump=dump)
    tally = _replayed(trace, settings, conditions, dump, progress)
    return _summary(trace, settings, conditions, costs, tally, rates)


def _summary(
    trace: RoutingTrace,
    settings: PlannerSettings,
    conditions: Conditions,
    costs: ShapeCosts,
    tally: Tally,
    rates: dict[str, float],
) -> Report:
    path = conditions.path(settings)
    issued, useful = tally.prefetch_issued, tally.prefetch_useful
    total = tally.total_seconds or 1.0
    over, overlapped = tally.over_optimal, tally.overlapped_over_optimal
    gap = rates["belady_hit_rate"] - rates["lru_hit_rate"]
    return {
        "model": trace.meta.model,
        "hardware": conditions.profile.name,
        "shape": costs.shape,
        "host_path": None if path.host_path == NO_HOST else path.host_path,
        "in_graph": path.in_graph,
        "batch": conditions.batch,
        "gpu_experts": conditions.gpu_experts,
        "slots": conditions.num_slots(trace),
        "host_experts": 1.0 if conditions.memory is None else conditions.memory.share,
        "assignment": settings.rule(graph_tokens=conditions.batch if path.in_graph else 0),
        "eviction": settings.eviction,
        "prediction": settings.prediction,
        "tokens": tally.tokens,
        "steps": tally.steps,
        **rates,
        "gap_closed": (rates["hit_rate"] - rates["lru_hit_rate"]) / gap if gap else None,
        "timed_hit_rate": tally.hits / tally.demands if tally.demands else 0.0,
        "prefetch": {
            "issued": issued,
            "useful": useful,
            "accuracy": useful / issued if issued else None,
        },
        "speculation": {
            "drafted": tally.drafted,
            "accepted": tally.accepted,
            "tokens_per_step": tally.decode_tokens / tally.decode_steps
            if tally.decode_steps
            else None,
        },
        "decode_tokens_per_second": tally.decode_tokens_per_second() or None,
        "prefill_tokens_per_second": tally.prefill_tokens_per_second(),
        "bytes_fetched": tally.copies * costs.expert_bytes,
        "bytes_read": tally.reads * whole_pages(costs.expert_bytes),
        "busy": {
            "cpu": tally.cpu_busy_seconds / total,
            "gpu": tally.gpu_busy_seconds / total,
            "link": min(1.0, tally.link_busy_seconds / total),
        },
        "plan_microseconds": tally.plan_microseconds(),
        "plan_over_optimal": {
            "mean": _mean(over),
            "worst": max(over, default=None),
            "layers_compared": len(over),
            "executed_mean": _mean(tally.executed_over_optimal),
            "executed_overlapped_mean": _mean(overlapped),
            "executed_overlapped_worst": max(overlapped, default=None),
        },
    }


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None
