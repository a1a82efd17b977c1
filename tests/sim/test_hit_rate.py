"""Tests of cache replays: known sequences, and Belady as an upper bound."""

import itertools

import pytest
from hypothesis import given, settings

from tandem.policy.eviction import EVICTIONS
from tandem.policy.plan import Geometry, LayerLoad
from tandem.policy.residency import sets_by_layer
from tandem.sim.hit_rate import belady_hit_rate, hit_rate
from tests.policy.strategies import GEOMETRY, steps

ONE = Geometry(num_layers=1, num_experts=4, top_k=1)


def loads(*experts: int) -> list[list[LayerLoad]]:
    return [[LayerLoad(0, (expert,), (1,))] for expert in experts]


def rate(name: str, sequence: list[list[LayerLoad]], slots: int) -> float:
    return hit_rate(iter(sequence), ONE, [slots], EVICTIONS.factory(name)(ONE))


def test_lru_and_belady_on_a_known_sequence() -> None:
    sequence = loads(0, 1, 2, 0, 1, 2)
    assert rate("lru", sequence, 2) == 0.0
    assert belady_hit_rate(iter(sequence), ONE, [2]) == pytest.approx(2 / 6)
    assert rate("lru", sequence, 3) == 0.5


def test_belady_bypasses_what_comes_last() -> None:
    assert belady_hit_rate(iter(loads(0, 1, 0, 2, 0, 3, 0)), ONE, [1]) == pytest.approx(3 / 7)


def best_by_search(sequence: list[list[LayerLoad]], slots: int) -> float:
    """Return the highest hit rate of all demand-filled caches, by trying every content."""
    reachable: dict[frozenset[int], int] = {frozenset(): 0}
    demands = 0
    for layers in sequence:
        used = set(layers[0].experts)
        demands += len(used)
        following: dict[frozenset[int], int] = {}
        for held, hits in reachable.items():
            pool, found = held | used, hits + len(held & used)
            for size in range(min(slots, len(pool)) + 1):
                for kept in map(frozenset, itertools.combinations(sorted(pool), size)):
                    following[kept] = max(following.get(kept, 0), found)
        reachable = following
    return max(reachable.values()) / demands


@settings(max_examples=30)
@given(sequence=steps(Geometry(1, 5, 2)))
def test_belady_equals_exhaustive_search(sequence: list[list[LayerLoad]]) -> None:
    geometry = Geometry(1, 5, 2)
    found = belady_hit_rate(iter(sequence), geometry, [2])
    assert found == pytest.approx(best_by_search(sequence, 2))


DEMAND_FILLED = [name for name in EVICTIONS if name != "dali-window"]  # swaps at windows' ends


@pytest.mark.parametrize("name", DEMAND_FILLED)
@settings(max_examples=30)
@given(sequence=steps())
def test_belady_is_never_beaten(name: str, sequence: list[list[LayerLoad]]) -> None:
    for sizes in (sets_by_layer(7, GEOMETRY.num_layers), [7]):
        policy = EVICTIONS.factory(name)(GEOMETRY)
        bound = belady_hit_rate(iter(sequence), GEOMETRY, sizes)
        assert hit_rate(iter(sequence), GEOMETRY, sizes, policy) <= bound + 1e-12
