"""What the expert cache holds before the first step: nothing, random experts, or the hottest."""

import random
from collections.abc import Sequence

from tandem.core.registry import Registry
from tandem.policy.plan import Geometry

STARTS: Registry[list[int]] = Registry("start content")


@STARTS.register("heat")
def hottest(geometry: Geometry, set_sizes: Sequence[int], heat: Sequence[float]) -> list[int]:
    """Return the keys of experts that fill every set: the most used in earlier runs.

    Experts of equal heat are ordered at random.
    """
    order = list(range(len(heat)))
    random.Random(0).shuffle(order)
    order.sort(key=lambda key: -heat[key])
    return fill_sets(geometry, set_sizes, order)


@STARTS.register("random")
def random_start(geometry: Geometry, set_sizes: Sequence[int], heat: Sequence[float]) -> list[int]:
    """Return the keys of experts that fill every set, drawn at random with seed 0, as in DALI."""
    order = list(range(geometry.num_layers * geometry.num_experts))
    random.Random(0).shuffle(order)
    return fill_sets(geometry, set_sizes, order)


@STARTS.register("none")
def empty(geometry: Geometry, set_sizes: Sequence[int], heat: Sequence[float]) -> list[int]:
    """Return no keys: as in paper 2, the cache is empty at the start."""
    return []


def fill_sets(geometry: Geometry, set_sizes: Sequence[int], order: Sequence[int]) -> list[int]:
    """Return the keys of `order` in the same order, without those whose set is already full."""
    room = list(set_sizes)
    chosen = []
    for key in order:
        set_id = key // geometry.num_experts if len(room) > 1 else 0
        if room[set_id]:
            room[set_id] -= 1
            chosen.append(key)
    return chosen
