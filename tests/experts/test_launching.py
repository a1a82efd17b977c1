"""Tests of the order in which a device gets a layer's experts: groups as they arrive."""

from types import SimpleNamespace
from typing import Any

import pytest

from tandem.experts.execution.launching import launch
from tandem.policy.plan import Copy, LayerPlan


def launched(
    gpu: int, arriving: int, slots: list[int], ring: int
) -> tuple[list[tuple[int, int]], list[Any]]:
    """Return the batches (first, last), and all calls in order."""
    calls: list[Any] = []
    fetch = tuple(Copy(0, gpu + arriving + place, slot, None) for place, slot in enumerate(slots))
    experts = range(gpu + arriving)
    plan = LayerPlan(0, tuple(experts[:gpu]), tuple(experts[gpu:]), fetch, (), (), (), 0.0, 0.0)
    cache: Any = SimpleNamespace(
        planner=SimpleNamespace(
            ring=SimpleNamespace(size=ring),
            residency=SimpleNamespace(slot_of=[100 + e for e in experts]),
        ),
        geometry=SimpleNamespace(num_experts=1000),
        engine=SimpleNamespace(use=lambda slots, keys: (tuple(slots), tuple(keys))),
        submit=lambda copies, is_needed: calls.append([copy.slot for copy in copies]),
    )
    device: Any = SimpleNamespace(launch=lambda batch, use: calls.append((batch, use)))
    call: Any = SimpleNamespace(batch=lambda first, last, side: (first, last))
    launch(cache, device, call, plan, None)  # type: ignore[arg-type]
    return [each[0] for each in calls if isinstance(each, tuple)], calls


def test_a_group_is_submitted_then_residents_run_then_the_group() -> None:
    batches, calls = launched(gpu=10, arriving=0, slots=[*range(16), 0, 1, 2, 3], ring=16)
    assert calls[0] == [*range(8)]
    assert batches == [(0, 10), (10, 18), (18, 26), (26, 30)]
    assert calls[1] == ((0, 10), (tuple(range(100, 110)), tuple(range(10))))
    assert calls[2] == ((10, 18), (tuple(range(8)), tuple(range(10, 18))))
    assert calls[3] == [*range(8, 16)]


@pytest.mark.parametrize("ring", [0, 2, 3, 5, 16])
def test_no_batch_has_a_slot_twice_and_every_expert_is_in_one(ring: int) -> None:
    slots = [place % max(2, ring) for place in range(21)]
    slots[3] = 50  # a slot that one of the cache's sets has lent
    batches, calls = launched(gpu=7, arriving=5, slots=slots, ring=ring)
    assert sorted(place for batch in batches for place in range(*batch)) == [*range(33)]
    for each in calls:
        if isinstance(each, tuple):
            held = each[1][0]
            assert len(set(held)) == len(held)
            assert len(held) <= 8


def test_residents_alone_are_one_batch_and_nothing_is_none() -> None:
    assert launched(gpu=5, arriving=0, slots=[], ring=2)[0] == [(0, 5)]
    assert launched(gpu=0, arriving=0, slots=[], ring=2)[0] == []
    assert launched(gpu=0, arriving=2, slots=[], ring=2)[0] == [(0, 1), (1, 2)]
