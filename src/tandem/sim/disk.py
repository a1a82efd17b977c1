"""Host slots over a disk, on a virtual clock: how long a trace's steps take.

With a GPU, the planner's replay uses `HostTier`. Without a GPU, `replay_over_disk` works as real
runs do (`csrc/disk`), and the CPU computes all experts:

A layer requests its absent experts at once. Experts in memory are computed meanwhile; absent
experts are computed as they arrive, one after another at the disk's rate. In a prompt the next
layer's reads begin while a layer is computed; reads of layers routed by token id begin with the
step. Experts that the eviction does not admit are read too.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from tandem.core.config import require_range
from tandem.policy.cost import CostTable, ShapeCosts, whole_pages
from tandem.policy.eviction import EVICTIONS, Eviction
from tandem.policy.plan import Geometry, LayerLoad, LayerPlan
from tandem.policy.reads import IN_SLOT, ON_DISK, is_prompt
from tandem.policy.residency import EMPTY, READY
from tandem.sim.hit_rate import DemandCache, belady_hit_rate, demand_loads, hit_rate
from tandem.sim.steps import LoadReader, Step, replay_steps
from tandem.trace import RoutingTrace, TraceMeta

# (geometry, number of slots per layer) -> policy.
MakeEviction = Callable[[Geometry, int], Eviction]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class HostShare:
    """Host memory beside a GPU and a disk: its share of the experts, and its eviction policy."""

    share: float
    make_eviction: MakeEviction
    plans_reads: bool = True
    """Whether plans include the time of disk reads."""

    def __post_init__(self) -> None:
        """Raise `ConfigError` if the share is not between 0 and 1."""
        require_range("share", self.share, 0.0, 1.0, what="a fraction")


class _DeviceLast(Eviction):
    """Scores as another policy does, except that experts on the device have the lowest score."""

    background = "always"

    def __init__(self, eviction: Eviction, states: Sequence[int]) -> None:
        self._eviction, self._states = eviction, states

    def scores(self, keys: Sequence[int]) -> list[float]:
        scores, states = self._eviction.scores(keys), self._states
        return [
            0.0 if states[key] == READY else score for key, score in zip(keys, scores, strict=True)
        ]

    def admits(self, newcomer: float, victim: float) -> bool:
        return self._eviction.admits(newcomer, victim)


class HostTier:
    """Host slots between a GPU and a disk.

    Experts that the CPU computes and experts that leave the GPU may enter; experts that the GPU has
    are evicted first. A prompt's next layer is not read ahead.
    """

    def __init__(
        self, geometry: Geometry, memory: HostShare, states: Sequence[int], read_seconds: float
    ) -> None:
        """Start full of experts that the GPU lacks, as after loading a model.

        `states` has each expert's residency on the GPU, by key; it must be the planner's own
        sequence, which changes as experts move.
        """
        self.read_seconds, self._plans_reads = read_seconds, memory.plans_reads
        sizes = [int(geometry.num_experts * memory.share)] * geometry.num_layers
        eviction = memory.make_eviction(geometry, sizes[0])
        self._geometry = geometry
        self._cache = DemandCache(geometry, sizes, eviction, _DeviceLast(eviction, states))
        self.begin_step, self.has = self._cache.begin_step, self._cache.has
        for layer, size in enumerate(sizes):
            keys = range(geometry.key(layer, 0), geometry.key(layer + 1, 0))
            lacking = [key for key in keys if states[key] == EMPTY]
            self._cache.admit(LayerLoad(layer, (), ()), lacking[:size])

    def places(self, load: LayerLoad) -> bytes:
        """Return a byte for each active expert: whether it is in a host slot or on the disk.

        The result is empty if plans do not include the time of disk reads.
        """
        if not self._plans_reads:
            return b""
        has = self._cache.has
        return bytes(IN_SLOT if has(load.layer, expert) else ON_DISK for expert in load.experts)

    def use(self, load: LayerLoad, plan: LayerPlan) -> None:
        """Offer host slots to experts that the CPU computes, and to experts that leave the GPU."""
        if plan.cpu:
            tokens = dict(zip(load.experts, load.tokens, strict=True))
            used = LayerLoad(load.layer, plan.cpu, tuple(tokens[expert] for expert in plan.cpu))
            self._cache.use(used)
        for copy in (*plan.fetch, *plan.insert, *plan.prefetch):
            if copy.evicts is not None and not self._cache.has(*copy.evicts):
                layer = LayerLoad(copy.evicts.layer, (), ())
                self._cache.admit(layer, [self._geometry.key(*copy.evicts)])


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DiskConditions:
    """The conditions of a replay over a disk: machine, memory, batch, and how much is replayed."""

    costs: ShapeCosts
    """The costs; only those of the CPU and the dense parts are used."""
    bytes_per_second: float
    share: float
    """The share of each layer's experts that host memory has slots for."""
    batch: int = 1
    prompt: int = 16
    limit: int = 1 << 60

    def __post_init__(self) -> None:
        """Raise `ConfigError` for a value out of its range."""
        require_range("share", self.share, 0.0, 1.0, what="a fraction")
        require_range("batch", self.batch, 1)
        require_range("prompt", self.prompt, 0)
        require_range("limit", self.limit, 1)

    @property
    def read_bytes(self) -> int:
        """Bytes read from the disk for one expert."""
        return whole_pages(self.costs.expert_bytes)

    def set_sizes(self, geometry: Geometry) -> list[int]:
        """Return the number of host slots of each layer."""
        return [int(geometry.num_experts * self.share)] * geometry.num_layers


@dataclasses.dataclass(slots=True)
class DiskTally:
    """The totals of a replay over a disk; for decode steps unless noted otherwise."""

    tokens: int = 0  # including prompts
    steps: int = 0  # likewise
    prefill_tokens: int = 0
    prefill_seconds: float = 0.0
    decode_tokens: int = 0
    decode_seconds: float = 0.0
    bound_seconds: float = 0.0
    """A lower bound of the time: max(reads, computing of residents) per layer, plus the dense
    parts. All layers that are routed by token id count as one layer."""
    demands: int = 0
    misses: int = 0
    read_bytes: int = 0

    @property
    def hit_rate(self) -> float:
        """The share of active experts that were in memory when their layer began."""
        return 1 - self.misses / self.demands if self.demands else 0.0

    @property
    def decode_tokens_per_second(self) -> float | None:
        """The decode speed of all sequences together; None without decode steps."""
        return self.decode_tokens / self.decode_seconds if self.decode_seconds else None


def replay_over_disk(
    trace: RoutingTrace,
    conditions: DiskConditions,
    make_eviction: MakeEviction,
    *,
    progress: Callable[[int], None] | None = None,
) -> DiskTally:
    """Replay a trace until it ends or the limit is reached; return the totals.

    `progress` gets the number of tokens of each step.
    """
    replay, reader = _Replay(trace.meta, conditions, make_eviction), LoadReader(trace)
    tally = replay.tally
    for step in replay_steps(trace, conditions.batch, conditions.prompt):
        replay.step(step, reader.loads(step))
        if progress is not None:
            progress(step.num_new)
        if tally.tokens >= conditions.limit:
            break
    return tally


class _Replay:
    """A replay on a clock of CPU and disk; a layer begins when the previous layer is done."""

    def __init__(
        self, meta: TraceMeta, conditions: DiskConditions, make_eviction: MakeEviction
    ) -> None:
        geometry, self._by_token = meta.geometry, frozenset(meta.by_token)
        sizes = conditions.set_sizes(geometry)
        self.tally = DiskTally()
        self._cache = DemandCache(geometry, sizes, make_eviction(geometry, sizes[0]))
        self._costs = CostTable(conditions.costs)
        self._read_bytes = conditions.read_bytes
        self._read_seconds = conditions.read_bytes / conditions.bytes_per_second
        self._now = self._disk_free = 0.0

    def step(self, step: Step, loads: list[LayerLoad]) -> None:
        num_tokens, tally, begin = len(step.tokens), self.tally, self._now
        reads_ahead = is_prompt(num_tokens)
        dense, bound, misses = self._costs.dense(num_tokens), 0.0, 0
        self._cache.begin_step(is_prefill=reads_ahead)
        requested_at, known = None, (0.0, 0.0)
        for load in loads:
            is_known = load.layer in self._by_token
            self._now += dense
            absent, _ = self._cache.use(load)
            misses += len(absent)
            begun = self._now
            since = begin if is_known else begun if requested_at is None else requested_at
            reads, computing = self._run(load, absent, since)
            if is_known:
                known = known[0] + reads, known[1] + dense + computing
            else:
                bound += dense + max(reads, computing)
            requested_at = begun if reads_ahead else None
        bound += max(known)
        tally.steps += 1
        tally.tokens += step.num_new
        if step.is_prefill:
            tally.prefill_tokens += step.num_new
            tally.prefill_seconds += self._now - begin
            return
        tally.decode_tokens += step.num_new
        tally.decode_seconds += self._now - begin
        tally.bound_seconds += bound
        tally.demands += sum(len(load.experts) for load in loads)
        tally.misses += misses
        tally.read_bytes += misses * self._read_bytes

    def _run(self, load: LayerLoad, absent: list[int], requested_at: float) -> tuple[float, float]:
        """Run a layer's experts; the absent experts were requested at `requested_at`.

        Returns the seconds of reading the absent experts, and of computing the experts in memory.
        """
        costs = self._costs
        costs.require(max(load.tokens))
        seconds = dict(zip(load.experts, (costs.cpu[n] for n in load.tokens), strict=True))
        missing = [seconds.pop(expert) for expert in absent]
        of_residents = sum(seconds.values())
        self._now += costs.cpu_first + of_residents
        self._disk_free = max(self._disk_free, requested_at)
        for of_expert in missing:
            self._disk_free += self._read_seconds
            self._now = max(self._now, self._disk_free) + of_expert
        return len(missing) * self._read_seconds, of_residents


def simulate_over_disk(
    trace: RoutingTrace,
    conditions: DiskConditions,
    make_eviction: MakeEviction,
    *,
    progress: Callable[[int], None] | None = None,
) -> dict[str, Any]:
    """Return the report of `tandem simulate --disk` on one trace: a JSON object."""
    geometry = trace.meta.geometry
    tally = replay_over_disk(trace, conditions, make_eviction, progress=progress)
    rates = disk_hit_rates(trace, conditions, make_eviction)
    gap = rates["belady_hit_rate"] - rates["lru_hit_rate"]
    sizes, is_decoding = conditions.set_sizes(geometry), tally.decode_tokens > 0
    return {
        "model": trace.meta.model,
        "shape": conditions.costs.shape,
        "disk_bytes_per_second": conditions.bytes_per_second,
        "batch": conditions.batch,
        "host_experts": conditions.share,
        "slots": sum(sizes),
        "slots_bytes": sum(sizes) * conditions.read_bytes,
        "tokens": tally.tokens,
        "steps": tally.steps,
        **rates,
        "gap_closed": (rates["hit_rate"] - rates["lru_hit_rate"]) / gap if gap else None,
        "timed_hit_rate": tally.hit_rate,
        "decode_tokens_per_second": tally.decode_tokens_per_second,
        "time_over_bound": tally.decode_seconds / tally.bound_seconds if is_decoding else None,
        "prefill_tokens_per_second": tally.prefill_tokens / tally.prefill_seconds
        if tally.prefill_tokens
        else None,
        "bytes_read": tally.read_bytes,
        "bytes_read_per_token": tally.read_bytes / tally.decode_tokens if is_decoding else None,
        "disk_share": tally.read_bytes / conditions.bytes_per_second / tally.decode_seconds
        if is_decoding
        else None,
    }


def disk_hit_rates(
    trace: RoutingTrace, conditions: DiskConditions, make_eviction: MakeEviction
) -> dict[str, float]:
    """Return the hit rates of `make_eviction`'s policy, LRU and Belady at equal slots.

    Every token is a decode step, as in `sim.hit_rate`.
    """
    geometry, sizes = trace.meta.geometry, conditions.set_sizes(trace.meta.geometry)
    loads = list(demand_loads(trace, conditions.batch, conditions.limit))
    lru, own = EVICTIONS.factory("lru")(geometry), make_eviction(geometry, sizes[0])
    return {
        "hit_rate": hit_rate(iter(loads), geometry, sizes, own),
        "lru_hit_rate": hit_rate(iter(loads), geometry, sizes, lru),
        "belady_hit_rate": belady_hit_rate(iter(loads), geometry, sizes),
    }
