"""Tests of CPU, GPU and link on the virtual clock, checked by hand."""

import dataclasses
from typing import Any

import pytest

from tandem.hardware.profiles import load_profile
from tandem.policy.cost import HardwareProfile
from tandem.policy.plan import TWICE, Copy, ExpertId, LayerLoad, LayerPlan
from tandem.sim.timeline import Arrival, Timeline
from tests.policy.strategies import shape_costs


def timeline(slowdown: float = 1.0) -> Timeline:
    costs = shape_costs(cpu=(1.0, 2.0), gpu=(0.25, 0.25), link=2.0, dense=(0.5, 0.5), first=0.125)
    profile: HardwareProfile = dataclasses.replace(
        load_profile("laptop-8gb"),
        shapes=(costs,),
        cpu_slowdown_while_copying=slowdown,
        link_slowdown_while_computing=slowdown,
    )
    return Timeline(profile, costs)


def plan(**fields: Any) -> LayerPlan:
    empty = LayerPlan(0, (), (), (), (), (), (), 0.0, 0.0)
    return empty._replace(**fields)


def test_cpu_and_gpu_work_side_by_side() -> None:
    clock = timeline()
    clock.run_dense(1)
    clock.run(LayerLoad(0, (1, 2, 3), (1, 2, 1)), plan(gpu=(1,), cpu=(2, 3)))
    assert clock.now == 0.5 + 0.125 + 2.0 + 1.0
    assert (clock.cpu_busy, clock.gpu_busy, clock.link_busy) == (3.125, 0.75, 0.0)


def test_fetches_follow_each_other_and_experts_follow_their_copies() -> None:
    clock = timeline()
    copies = (Copy(0, 1, 0, None), Copy(0, 2, 1, ExpertId(0, 5)))
    clock.run(LayerLoad(0, (1, 2), (1, 1)), plan(fetch=copies))
    assert clock.now == 4.25
    assert list(clock.arrivals()) == [Arrival(0, 1, 2.0), Arrival(0, 2, 4.0)]
    assert list(clock.arrivals()) == []


def test_a_ring_slot_is_overwritten_after_its_expert_has_run() -> None:
    clock = timeline()
    copies = (Copy(0, 1, 9, None), Copy(0, 2, 9, None))
    clock.run(LayerLoad(0, (1, 2), (1, 1)), plan(fetch=copies))
    assert clock.now == 2.0 + 0.25 + 2.0 + 0.25


def test_a_layer_that_is_launched_twice_waits_for_all_before_what_it_fetched() -> None:
    shape = dataclasses.replace(
        timeline().costs.costs, second_launch_seconds=0.0625, copy_wake_seconds=0.5
    )
    clock = Timeline(dataclasses.replace(load_profile("laptop-8gb"), shapes=(shape,)), shape)
    clock._link_slowdown = clock._cpu_slowdown = 1.0
    copies = (Copy(0, 2, 0, None), Copy(0, 3, 1, None))
    load = LayerLoad(0, (1, 2, 3, 4), (1, 1, 1, 1))
    twice = plan(gpu=(1,), fetch=copies, cpu=(4,), launches=TWICE)
    clock.run(load, twice)
    # A thread wakes up, two copies follow each other, it is notified; then one launch of both.
    assert clock.now == 0.5 + 2 * 2.0 + 0.5 + 0.0625 + 2 * 0.25
    assert (clock.cpu_busy, clock.gpu_busy, clock.link_busy) == (1.125, 0.75, 4.0)
    before = clock.now
    clock.run(load, plan(gpu=(1,), cpu=(2, 3, 4), launches=TWICE))
    assert clock.now == before + 0.125 + 3 * 1.0 + 0.0625  # also where nothing is fetched


def test_background_copies_delay_nothing_but_later_copies() -> None:
    clock = timeline()
    load = LayerLoad(0, (1,), (1,))
    clock.run(load, plan(gpu=(1,), insert=(Copy(0, 4, 0, None),)))
    assert clock.now == 0.25
    clock.run(load, plan(fetch=(Copy(0, 1, 1, None),)))
    assert clock.now == 4.25


def test_an_arriving_expert_waits_for_its_copy() -> None:
    clock = timeline()
    clock.issue((Copy(0, 3, 0, None),))
    clock.run(LayerLoad(0, (1, 3), (1, 1)), plan(gpu=(1,), arriving=(3,)))
    assert clock.now == 2.25


def test_cpu_and_link_slow_each_other_down() -> None:
    clock = timeline(slowdown=1.5)
    clock.run(LayerLoad(0, (1,), (1,)), plan(cpu=(1,), insert=(Copy(0, 4, 0, None),)))
    assert clock.link_busy == 3.0
    assert clock.now == pytest.approx(1.125 * 1.5)
