"""Tests of the expected cost of steps with several tokens, by touched experts and measured."""

import pytest

from tandem.policy.cost import CostTable
from tandem.policy.plan import LayerLoad
from tandem.policy.planner import Planner
from tandem.policy.settings import PlannerSettings, make_planner
from tandem.policy.speculation.step_costs import StepCosts
from tandem.policy.speculation.step_shape import TouchedExperts, shape_of_bytes
from tests.policy.strategies import GEOMETRY, shape_costs


def measured(costs: StepCosts, seconds: dict[int, float], count: int = 40) -> StepCosts:
    for _ in range(count):
        for size, each in seconds.items():
            costs.add(size, each)
    return costs


def test_nothing_is_known_at_first() -> None:
    costs = StepCosts()
    assert costs.seconds(2) is None
    costs.add(1, 9.0)  # the first of a size is recorded
    assert costs.seconds(1) is None
    costs.add(1, 3.0)
    assert costs.seconds(1) == pytest.approx(3.0)
    assert costs.num_known(1) == 1


@pytest.mark.parametrize("size", [2, 3, 8])
def test_one_measured_size_gives_the_others_by_the_shape(size: int) -> None:
    shape = shape_of_bytes(3.0, 1.0)
    costs = measured(StepCosts(shape), {1: 0.5})
    assert costs.seconds(size) == pytest.approx(0.5 * shape(size) / shape(1))


def test_sizes_that_were_not_tried_follow_those_that_were() -> None:
    costs = measured(StepCosts(lambda n: n**0.5), {1: 1.0, 4: 4.0})  # costlier than the shape
    assert costs.seconds(4) == pytest.approx(4.0, rel=0.1)
    assert costs.seconds(2) == pytest.approx(2.0, rel=0.1)
    assert costs.seconds(8) == pytest.approx(8.0, rel=0.2)


def test_a_size_may_be_special() -> None:
    costs = measured(StepCosts(float), {1: 1.0, 2: 2.0, 3: 1.6, 4: 4.0})
    assert costs.seconds(3) == pytest.approx(1.6, rel=0.2)
    assert costs.seconds(4) == pytest.approx(4.0, rel=0.15)


def test_a_disturbed_step_moves_little() -> None:
    costs = measured(StepCosts(), {1: 1.0})
    costs.add(1, 50.0)
    assert costs.seconds(1) == pytest.approx(1.0, rel=0.05)


def planning(num_slots: int) -> Planner:
    """Return a planner for which a second token of an expert costs little."""
    costs = CostTable(shape_costs(cpu=(1.0, 1.1)))
    return make_planner(PlannerSettings(), GEOMETRY, costs, num_slots, copy_price_seconds=0.01)


def routed(planner: Planner, routes: list[list[int]]) -> TouchedExperts:
    touched = TouchedExperts(lambda: planner)
    for _ in range(3):
        touched.observe(LayerLoad(0, (), (), (), routes))
    return touched


ALIKE, APART = [[0, 1]] * 8, [[i % 4, (i + 1) % 4] for i in range(8)]


def test_tokens_that_share_experts_cost_less() -> None:
    alike, apart = routed(planning(0), ALIKE), routed(planning(0), APART)
    assert alike(1) == pytest.approx(apart(1))
    assert alike(3) < apart(3) < 3 * alike(1)
    assert apart(32) > apart(16) > apart(8)


def test_what_is_resident_costs_less() -> None:
    some = planning(12)
    absent = routed(some, ALIKE)
    for expert in (0, 1):
        some.residency.insert(some.geometry.key(0, expert), some.residency.set_of(0))
    resident = routed(some, ALIKE)
    assert all(resident(n) < absent(n) for n in (1, 2, 8))


def test_before_anything_is_routed_more_tokens_cost_more() -> None:
    some = planning(0)
    touched = TouchedExperts(lambda: some)
    assert 0 < touched(1) < touched(2) < touched(20)
