"""Tests that a planned step weighs the reads of experts that neither memory nor the device has."""

import pytest

from tandem.policy.cost import CostTable
from tandem.policy.plan import LayerLoad
from tandem.policy.reads import IN_SLOT, ON_DISK, PASSING
from tandem.policy.settings import PlannerSettings, make_planner
from tests.policy.strategies import GEOMETRY, shape_costs


@pytest.mark.parametrize("num_resident", [3, 24])
def test_residents_that_memory_lacks_do_not_spill(num_resident: int) -> None:
    """Also where the device has the whole model."""
    costs = CostTable(shape_costs(cpu=(1.0, 2.0), gpu=(1.0, 1.0)), read_seconds=0.5)
    for places, cpu in (
        ((ON_DISK, ON_DISK), ()), ((IN_SLOT, ON_DISK), (0,)), ((ON_DISK, PASSING), (1,)),
    ):  # fmt: skip
        chosen = make_planner(PlannerSettings(), GEOMETRY, costs, 26, resident=range(num_resident))
        chosen.begin_step(1, 0.0)
        assert chosen.plan(LayerLoad(0, (0, 1), (1, 1)), 0.0, places=bytes(places)).cpu == cpu


def test_planned_steps_weigh_reads() -> None:
    """A copy waits for its read, and comes behind the others; the CPU has time until then."""
    load = LayerLoad(0, (0, 1, 2), (1, 1, 1))
    for places, read, fetched in (
        (b"", 0.0, [0, 1, 2]),
        (bytes([ON_DISK, IN_SLOT, IN_SLOT]), 0.1, [1, 2, 0]),
        (bytes([ON_DISK, IN_SLOT, IN_SLOT]), 9.0, []),
    ):
        shape = shape_costs(cpu=(1.0, 2.0), gpu=(0.01, 0.01), link=1.2 if read > 1 else 0.1)
        chosen = make_planner(PlannerSettings(), GEOMETRY, CostTable(shape, read_seconds=read), 9)
        chosen.begin_step(1, 0.0)
        plan = chosen.plan(load, 0.0, places=places)
        assert [copy.expert for copy in plan.fetch] == fetched
