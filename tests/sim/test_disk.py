"""Tests of experts on a disk on the virtual clock: times by hand, bounds, monotonicity."""

import dataclasses
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import pytest

from tandem.core.errors import ConfigError
from tandem.experts.cache.policy_tables import NATIVE_TABLES, host_slot_eviction
from tandem.hardware.profiles import load_profile
from tandem.policy.cost import DiskCosts, HardwareProfile, ShapeCosts
from tandem.policy.eviction import EVICTIONS
from tandem.policy.eviction.next_use import NextUse, span_for
from tandem.policy.plan import Copy, ExpertId, Geometry, LayerLoad, LayerPlan
from tandem.policy.reads import IN_SLOT, ON_DISK
from tandem.policy.residency import READY
from tandem.sim.disk import (
    DiskConditions,
    DiskTally,
    HostShare,
    HostTier,
    MakeEviction,
    replay_over_disk,
    simulate_over_disk,
)
from tandem.sim.hit_rate import demand_loads, hit_rate
from tandem.sim.replay import Tally
from tandem.sim.simulation import Conditions, run_timed
from tandem.sim.systems import TANDEM
from tandem.sim.timeline import Timeline
from tandem.trace import RoutingTrace, TraceMeta, read_trace
from tests.conftest import REPOSITORY

CPU, DENSE, FIRST, READ = 1.0, 10.0, 0.5, 4.0
PAGE = 4096


def costs(num_experts: int = 8, top_k: int = 2, layers: int = 1) -> ShapeCosts:
    return ShapeCosts(
        shape="test", num_moe_layers=layers, num_experts=num_experts, top_k=top_k,
        expert_bytes=PAGE - 1, tokens=(1,), cpu_seconds=(CPU,), gpu_seconds=(0.0,),
        dense_seconds=(DENSE,), cpu_first_expert_seconds=FIRST, link_seconds_per_expert=0.0,
    )  # fmt: skip


def trace_of(*tokens: Sequence[Sequence[int]], num_experts: int = 8) -> RoutingTrace:
    """Return a trace of one sequence; each token lists its experts by layer."""
    experts = np.array(tokens, dtype=np.uint16)
    count, layers, top_k = experts.shape
    return RoutingTrace(
        meta=TraceMeta(model="test", n_moe_layers=layers, n_experts=num_experts, top_k=top_k),
        experts=experts,
        seq_offsets=np.array([0, count]),
    )


def recorded(num_layers: int) -> RoutingTrace:
    """Return the first layers of a real trace."""
    whole = read_trace(REPOSITORY / "data" / "traces" / "deepseek-v2-lite.npz")
    meta = dataclasses.replace(whole.meta, n_moe_layers=num_layers)
    experts = whole.experts[:, :num_layers]
    return dataclasses.replace(whole, meta=meta, experts=experts, weights=None, predicted=None)


def by_name(name: str) -> MakeEviction:
    return lambda geometry, num_slots: EVICTIONS.factory(name)(geometry)


def replayed(trace: RoutingTrace, share: float, prompt: int = 0) -> DiskTally:
    geometry = trace.meta.geometry
    conditions = DiskConditions(
        costs=costs(geometry.num_experts, geometry.top_k, geometry.num_layers),
        bytes_per_second=PAGE / READ, share=share, prompt=prompt,
    )  # fmt: skip
    return replay_over_disk(trace, conditions, by_name("lru"))


def test_experts_are_computed_as_they_come() -> None:
    """With both absent, each waits for its read; with one absent, the other is computed first."""
    first = DENSE + 2 * READ + CPU
    assert replayed(trace_of([[0, 1]]), 0.5).decode_seconds == first
    tally = replayed(trace_of([[0, 1]], [[1, 2]], [[2, 1]]), 0.5)
    assert tally.decode_seconds == first + DENSE + READ + CPU + DENSE + FIRST + 2 * CPU
    assert (tally.demands, tally.misses, tally.read_bytes) == (6, 3, 3 * PAGE)
    assert tally.bound_seconds == 3 * DENSE + 2 * READ + READ + 2 * CPU


def test_a_layers_reads_begin_when_the_layer_above_is_done() -> None:
    tally = replayed(trace_of([[0, 1], [2, 3]]), 0.5)
    assert tally.decode_seconds == 2 * (DENSE + 2 * READ + CPU)


def test_a_prompt_reads_the_next_layer_while_one_is_computed() -> None:
    """40 tokens with equal experts take 40 CPU seconds each, longer than a read."""
    tokens = 40
    tally = replayed(trace_of(*[[[0, 1], [2, 3]]] * tokens), 0.5, prompt=tokens)
    of_expert = tokens * CPU
    dense = tokens * DENSE
    first = dense + READ + 2 * of_expert
    second = dense + FIRST + 2 * of_expert
    assert tally.prefill_seconds == first + second
    assert (tally.prefill_tokens, tally.decode_tokens) == (tokens, 0)
    assert tally.decode_tokens_per_second is None


def test_reads_of_layers_by_token_begin_with_the_step() -> None:
    """The first layer's reads come first, the second's follow at once; no layer waits for one."""
    trace = trace_of([[0, 1], [2, 3], [4, 5]])
    known = dataclasses.replace(trace, meta=dataclasses.replace(trace.meta, by_token=(0, 1)))
    tally = replayed(known, 0.5)
    assert 4 * READ < 2 * DENSE
    assert tally.decode_seconds == 2 * (DENSE + FIRST + 2 * CPU) + DENSE + 2 * READ + CPU
    assert tally.bound_seconds == 3 * DENSE + 2 * READ
    assert tally.misses == replayed(trace, 0.5).misses


def test_what_all_fits_takes_what_computing_takes() -> None:
    tally = replayed(trace_of([[0, 1]], [[0, 1]]), 1.0, prompt=1)
    assert tally.decode_seconds == DENSE + FIRST + 2 * CPU
    assert tally.hit_rate == 1.0


@pytest.mark.parametrize("share", [-0.1, 1.1])
def test_a_share_is_a_fraction(share: float) -> None:
    with pytest.raises(ConfigError, match="expected a fraction"):
        DiskConditions(costs=costs(), bytes_per_second=1.0, share=share)


@pytest.mark.parametrize("name", ["lru", "next-use"])
def test_more_memory_is_not_slower(name: str) -> None:
    trace = read_trace(REPOSITORY / "data" / "traces" / "gpt-oss-20b.npz")
    times = []
    for slots in range(4, 33, 4):
        conditions = DiskConditions(
            costs=costs(32, 4, 24), bytes_per_second=PAGE / READ, share=slots / 32, limit=150
        )
        times.append(replay_over_disk(trace, conditions, by_name(name)).decode_seconds)
    assert all(more <= less for less, more in pairwise(times))


def test_the_report_says_what_was_read_and_how_far_it_is_from_the_bound() -> None:
    trace = trace_of([[0, 1]], [[1, 2]], [[2, 1]])
    conditions = DiskConditions(costs=costs(), bytes_per_second=PAGE / READ, share=0.5, prompt=0)
    found = simulate_over_disk(trace, conditions, by_name("lru"))
    tally = replayed(trace, 0.5)
    assert found["bytes_read"] == 3 * PAGE
    assert found["bytes_read_per_token"] == PAGE
    assert found["disk_share"] == 3 * READ / tally.decode_seconds
    assert found["time_over_bound"] == tally.decode_seconds / tally.bound_seconds
    assert found["hit_rate"] == found["timed_hit_rate"] == 0.5
    assert (found["slots"], found["slots_bytes"]) == (4, 4 * PAGE)


@pytest.mark.parametrize(
    ("num_slots", "top_k", "span"),
    [
        (0, 8, (8, 0.8)),
        (16, 4, (12, 1 - 1.6 / 12)),
        (45, 6, (22, 1 - 1.6 / 22)),
        (128, 8, (32, 0.95)),
    ],
)
def test_many_slots_look_further_ahead(num_slots: int, top_k: int, span: tuple[int, float]) -> None:
    assert span_for(num_slots, top_k) == pytest.approx(span)


def test_looking_further_ahead_hits_more_where_most_experts_are_in_memory() -> None:
    trace = recorded(3)
    geometry, sizes = trace.meta.geometry, [45] * 3  # of 64
    loads = list(demand_loads(trace, 1, 3000))
    near = NextUse(geometry, tables=NATIVE_TABLES)
    far = host_slot_eviction("next-use")(geometry, sizes[0])
    rates = [hit_rate(iter(loads), geometry, sizes, eviction) for eviction in (near, far)]
    assert rates[1] > rates[0] + 0.002


def profile_with_disk(rate: float) -> HardwareProfile:
    """One whose CPU and link do not slow each other down."""
    disk = DiskCosts(reads="direct", piece_bytes=PAGE, depths=(1,), bytes_per_second=(rate,))
    return dataclasses.replace(
        load_profile("desktop-12gb"), disk=disk, cpu_slowdown_while_copying=1.0,
        link_slowdown_while_computing=1.0,
    )  # fmt: skip


class Without:
    """Memory that lacks some experts."""

    read_seconds = READ

    def __init__(self, *absent: int) -> None:
        self._absent = absent

    def has(self, layer: int, expert: int) -> bool:
        return expert not in self._absent


def run_layer(*absent: int) -> Timeline:
    """Run a layer of which the CPU has experts 0 and 1, the GPU fetches 2, and 1 gets a slot."""
    profile = profile_with_disk(PAGE / READ)
    shape = dataclasses.replace(costs(), gpu_seconds=(0.25,), link_seconds_per_expert=2.0)
    clock = Timeline(profile, shape, Without(*absent))
    fetch, insert = (Copy(0, expert, expert, None) for expert in (2, 1))
    plan = LayerPlan(0, (), (), (fetch,), (0, 1), (insert,), (), 0.0, 0.0, 0)
    clock.run(LayerLoad(0, (0, 1, 2), (1, 1, 1)), plan)
    return clock


def test_the_cpu_computes_what_is_read_for_it_and_copies_wait_for_their_reads() -> None:
    assert run_layer().now == FIRST + 2 * CPU
    assert run_layer(1).now == READ + CPU
    assert run_layer(1, 2).now == 2 * READ + 2.0 + 0.25
    # What the CPU has is in memory, and is not read again for its slot.
    assert [run_layer(*absent).num_reads for absent in ((), (1,), (1, 2), (3,))] == [0, 1, 2, 0]


def test_what_leaves_the_gpu_comes_back_and_what_the_gpu_has_leaves_first() -> None:
    geometry, states = Geometry(2, 4, 2), bytearray(8)
    tier = HostTier(geometry, HostShare(share=0.5, make_eviction=by_name("lru")), states, READ)

    def use(cpu: tuple[int, ...], *evicted: int) -> bytes:
        copies = tuple(Copy(0, 9, 0, ExpertId(0, expert)) for expert in evicted)
        load = LayerLoad(0, cpu, (1,) * len(cpu))
        tier.begin_step(is_prefill=False)
        tier.use(load, LayerPlan(0, (), (), copies, cpu, (), (), 0.0, 0.0, 0))
        return tier.places(LayerLoad(0, (0, 1, 2, 3), (1,) * 4))

    assert use((0, 1)) == bytes([IN_SLOT, IN_SLOT, ON_DISK, ON_DISK])
    states[1] = READY
    assert use((0,)) == use(()) == bytes([IN_SLOT, IN_SLOT, ON_DISK, ON_DISK])
    assert use((), 3) == bytes([IN_SLOT, ON_DISK, ON_DISK, IN_SLOT])


def over_disk(rate: float, share: float | None = 0.5, *, plans_reads: bool = True) -> Tally:
    """Replay some tokens with a GPU; a share of None: all experts are in memory."""
    memory = None
    if share is not None:
        memory = HostShare(share=share, make_eviction=by_name("lru"), plans_reads=plans_reads)
    conditions = Conditions(
        profile=profile_with_disk(rate), gpu_experts=0.25, prompt=1, limit=60, memory=memory,
        compare_every=0, host_path="segments",
    )  # fmt: skip
    return run_timed(recorded(4), TANDEM, conditions)


def test_reads_that_take_no_time_change_nothing() -> None:
    found, expected = over_disk(1e18, plans_reads=False), over_disk(1e18, None)
    assert found.decode_seconds == pytest.approx(expected.decode_seconds, rel=1e-6)
    assert (found.copies, found.reads > 100) == (expected.copies, True)


def test_plans_that_know_reads_are_quicker() -> None:
    found, unplanned = (over_disk(2e9, plans_reads=knows) for knows in (True, False))
    assert found.decode_seconds < 0.97 * unplanned.decode_seconds
    assert found.reads < unplanned.reads
    more = over_disk(2e9, 0.8)
    assert more.decode_seconds < found.decode_seconds


def test_a_gpu_over_a_disk_needs_the_disks_costs() -> None:
    memory = HostShare(share=0.5, make_eviction=by_name("lru"))
    with pytest.raises(ConfigError, match="has no disk"):
        Conditions(profile=load_profile("desktop-12gb"), gpu_experts=0.25, memory=memory)
    with pytest.raises(ConfigError, match="expected a fraction"):
        HostShare(share=1.1, make_eviction=by_name("lru"))
