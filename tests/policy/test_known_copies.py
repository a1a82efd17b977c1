"""Tests of prefetches of layers routed by token, in planned steps: exactly what they use."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.policy.cost import CostTable
from tandem.policy.plan import Copy, LayerLoad
from tandem.policy.planner import Planner
from tandem.policy.residency import READY
from tandem.policy.settings import POOLS, make_planner
from tandem.sim.systems import POLICIES, SimulatedSettings
from tests.policy.integrity import check_integrity, check_plan
from tests.policy.strategies import GEOMETRY, shape_costs, steps

FIRST, SECOND = LayerLoad(0, (1, 2), (1, 2)), LayerLoad(1, (4, 5), (3, 1))


def planner(num_slots: int = 12, link: float = 0.125, **choices: Any) -> Planner:
    costs = CostTable(shape_costs(link=link))
    made = SimulatedSettings(**{"prediction": "regression", "prefetch_count": 1, **choices})
    return make_planner(made, GEOMETRY, costs, num_slots, copy_price_seconds=0.01)


def named(copies: tuple[Copy, ...]) -> list[tuple[int, int]]:
    return [(copy.layer, copy.expert) for copy in copies]


@pytest.mark.parametrize("copies_prompts", [False, True])
def test_they_begin_with_the_step_the_nearest_layer_first(*, copies_prompts: bool) -> None:
    """More experts than are predicted per layer, those with most tokens first."""
    num_slots = 64 if copies_prompts else 12  # two of which are for prefetches
    chosen = planner(num_slots, copies_prompts=copies_prompts)
    ahead = chosen.begin_step(3, 0.0, known=[FIRST, SECOND])
    expected = [(0, 2), (0, 1), (1, 4), (1, 5)]
    assert named(ahead) == expected[: 2 if copies_prompts else 4]
    for copy in ahead:
        chosen.copy_finished(copy.layer, copy.expert, 0.4)
    plan = chosen.plan(FIRST, 0.5)
    assert (plan.hits, plan.fetch) == (2, ())
    if copies_prompts:  # the first layer's experts enter the cache, or leave
        assert named(plan.prefetch) == expected[2:]


def test_a_later_layer_waits_for_a_nearer_one() -> None:
    """The link has time for three before the first layer; a fourth would be late."""
    chosen = planner(link=0.2)
    first = LayerLoad(0, (0, 1, 2, 3), (1, 1, 1, 1))
    ahead = chosen.begin_step(3, 0.0, known=[first, SECOND])
    assert named(ahead) == [(0, 0), (0, 1), (0, 2)]


@pytest.mark.parametrize(("link", "count"), [(0.4, 2), (1.4, 1), (1.6, 0)])
def test_one_that_would_come_later_than_the_cpu_has_it_is_left(link: float, count: int) -> None:
    """The first layer is planned at 0.5; an expert takes the CPU 1.0."""
    first = LayerLoad(0, (0, 1, 2, 3), (1, 1, 1, 1))
    assert len(planner(link=link).begin_step(1, 0.0, known=[first])) == count


def test_what_the_layer_uses_stays_and_nothing_is_predicted_of_it() -> None:
    chosen = planner(3, eviction="lru", copies_prompts=False)
    residency = chosen.residency
    assert residency.capacity[0] == 1
    residency.insert(2, 0)
    residency.finish(2)
    assert chosen.begin_step(3, 0.0, known=[FIRST]) == ()
    assert residency.state[2] == READY
    (other,) = chosen.begin_step(3, 0.0, known=[LayerLoad(0, (1,), (1,))])
    assert (other.expert, other.evicts) == (1, (0, 2))


def test_without_copies_ahead_nothing_is() -> None:
    assert planner(prefetch_count=0).begin_step(1, 0.0, known=[FIRST]) == ()


def test_loads_of_long_prompts_are_priced() -> None:
    load = LayerLoad(0, (0, 1), (10_000, 1))
    assert named(planner(copies_prompts=True, num_slots=64).begin_step(
        10_000, 0.0, is_prefill=True, known=[load]
    )) == [(0, 0), (0, 1)]  # fmt: skip


@pytest.mark.parametrize("pool", POOLS)
@pytest.mark.parametrize("prefetch", POLICIES.prefetches.names())
@settings(max_examples=15)
@given(
    given_steps=steps(), lag=st.integers(0, 3), num_known=st.integers(1, 3),
    is_prefill=st.booleans(), copies_prompts=st.booleans(),
    link=st.sampled_from([0.0, 0.05, 0.5]),
)  # fmt: skip
def test_plans_stay_sound_and_only_what_is_known_is_copied(
    pool: str, prefetch: str, given_steps: list[list[LayerLoad]], lag: int, num_known: int,
    link: float, *, is_prefill: bool, copies_prompts: bool,
) -> None:  # fmt: skip
    chosen = planner(
        64 if copies_prompts else 12, link, pool=pool, prefetch=prefetch,
        copies_prompts=copies_prompts,
    )  # fmt: skip
    pending: list[Copy] = []
    now = 0.0

    def issue(copies: tuple[Copy, ...], ahead: tuple[Copy, ...]) -> None:
        for copy in ahead:
            assert copy.layer >= num_known or copy.expert in loads[copy.layer].experts
        for copy in (*copies, *ahead):
            assert copy.evicts not in [other[:2] for other in pending]
            pending.append(copy)

    def finish(keep: int) -> None:
        while len(pending) > keep:
            chosen.copy_finished(*pending.pop(0)[:2], now)

    for loads in given_steps:
        issue((), chosen.begin_step(9, now, is_prefill=is_prefill, known=loads[:num_known]))
        for load in loads:
            now += 0.5
            finish(keep=lag)
            plan = chosen.plan(load, now)
            check_plan(load, plan)
            issue(plan.fetch, ())
            while any(c.layer == load.layer and c.expert in load.experts for c in pending):
                finish(keep=len(pending) - 1)  # the layer ends after its copies
            issue(plan.insert, plan.prefetch)
            check_integrity(chosen.residency)
            now += plan.seconds
