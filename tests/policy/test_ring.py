"""Tests of the ring: it borrows slots of the cache during fetches, and returns them."""

from itertools import islice

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.policy.assignment import IN_GRAPH
from tandem.policy.cost import CostTable
from tandem.policy.eviction import EVICTIONS
from tandem.policy.plan import Geometry, LayerLoad
from tandem.policy.planner import Planner
from tandem.policy.residency import NOWHERE, Residency
from tandem.policy.ring import QUIET_STEPS, Ring
from tandem.policy.settings import PlannerSettings, make_planner
from tests.policy.integrity import check_integrity
from tests.policy.strategies import shape_costs

GEOMETRY = Geometry(num_layers=3, num_experts=16, top_k=4)
NUM_SLOTS = 24
PROMPT = LayerLoad(0, tuple(range(16)), (9,) * 16)


def fetching_planner() -> Planner:
    """Return a planner with a full cache that fetches a long prompt's misses."""
    costs = CostTable(shape_costs(cpu=(50.0, 50.0), gpu=(0.1, 0.1), link=0.1))
    resident = [GEOMETRY.key(layer, expert) for layer in range(3) for expert in range(16)]
    sizes = PlannerSettings().set_sizes(GEOMETRY, NUM_SLOTS)
    held = [key for key in resident if key % 16 < sizes[key // 16]]
    planner = make_planner(
        PlannerSettings(eviction="static"), GEOMETRY, costs, NUM_SLOTS, resident=held
    )
    planner.begin_step(9, 0.0, is_prefill=True)
    return planner


def test_a_fetch_borrows_slots_and_quiet_steps_give_them_back() -> None:
    planner = fetching_planner()
    residency, whole = planner.residency, [*planner.residency.capacity]
    assert sum(whole) == NUM_SLOTS - 1
    plan = planner.plan(PROMPT, 0.0)
    slots = {copy.slot for copy in plan.fetch}
    assert len(slots) == PlannerSettings().ring_slots(NUM_SLOTS) == 2
    assert len(residency.lent) == 1
    left = [copy.evicts for copy in plan.fetch if copy.evicts is not None]
    assert len(left) == 1
    assert residency.slot_of[GEOMETRY.key(*left[0])] == NOWHERE
    check_integrity(residency)
    for copy in plan.fetch:
        planner.copy_finished(copy.layer, copy.expert, 1.0)
    for step in range(QUIET_STEPS):
        planner.begin_step(1, 2.0 + step)
        assert residency.lent
    planner.begin_step(1, 99.0)
    assert not residency.lent
    assert residency.capacity == whole
    check_integrity(residency)


@pytest.mark.parametrize("name", IN_GRAPH)
def test_a_step_in_one_graph_borrows_before_it_begins_and_uses_no_slot_twice(name: str) -> None:
    costs = CostTable(shape_costs(cpu=(50.0, 50.0), gpu=(0.1, 0.1), link=0.1))
    settings = PlannerSettings(assignment=name, eviction="static")  # admits nothing
    sizes = settings.set_sizes(GEOMETRY, NUM_SLOTS)
    keys = range(GEOMETRY.num_layers * GEOMETRY.num_experts)
    held = [key for key in keys if key % 16 < sizes[key // 16]]
    planner = make_planner(settings, GEOMETRY, costs, NUM_SLOTS, resident=held)
    residency, fetches = planner.residency, name != "ready-on-gpu"
    load = LayerLoad(1, tuple(range(7, 16)), (1,) * 9)  # of them up to 8 are resident
    for step, num_slots in enumerate([1, 6]):  # as many as possible once they are requested
        planner.begin_step(1, 9.0 * step, in_graph=True)
        assert len(residency.lent) == (num_slots - 1) * fetches
        plan = planner.plan(load, 9.0 * step)
        assert len({copy.slot for copy in plan.fetch}) == len(plan.fetch) == num_slots * fetches
        assert not any(copy.evicts for copy in plan.fetch)
        fetched = [copy.expert for copy in plan.fetch]
        assert sorted([*plan.gpu, *plan.cpu, *fetched]) == [*load.experts]
        for copy in plan.fetch:
            planner.copy_finished(copy.layer, copy.expert, 9.0 * step + 1.0)
        check_integrity(residency)
    for step in range(3 * QUIET_STEPS):
        planner.begin_step(1, 30.0 + step, in_graph=True)
    assert not residency.lent


def test_a_fetch_keeps_borrowed_slots() -> None:
    planner = fetching_planner()
    planner.plan(PROMPT, 0.0)
    for step in range(QUIET_STEPS):
        planner.begin_step(1, 2.0 + step)
    plan = planner.plan(PROMPT, 50.0)
    assert plan.fetch
    assert not any(copy.evicts for copy in plan.fetch)
    planner.begin_step(1, 99.0)
    assert planner.residency.lent


@given(
    sizes=st.lists(st.integers(0, 6), min_size=3, max_size=3),
    size=st.integers(1, 8),
    held=st.sets(st.integers(0, 47), max_size=18),
    in_use=st.sets(st.integers(0, 47)),
    num_fetched=st.integers(0, 20),
)
def test_slots_take_turns_and_what_is_in_use_stays(
    sizes: list[int], size: int, held: set[int], in_use: set[int], num_fetched: int
) -> None:
    residency = Residency(GEOMETRY, sizes, 0)
    for key in held:
        if residency.free[key // 16]:
            residency.insert(key, key // 16)
            if key % 3:
                residency.finish(key)
    before = {key for keys in residency.members for key in keys}
    ring = Ring(residency, EVICTIONS.factory("lru")(GEOMETRY), (residency.num_slots,), size)
    given_slots = [*islice(ring.slots(in_use), num_fetched)]
    check_integrity(residency)
    slots, victims = [slot for slot, _ in given_slots], {key for _, key in given_slots}
    turn = len(set(slots))
    assert slots == [slots[at % turn] for at in range(len(slots))]
    assert turn <= size
    assert not victims & in_use
    assert before - {key for keys in residency.members for key in keys} == victims - {NOWHERE}
