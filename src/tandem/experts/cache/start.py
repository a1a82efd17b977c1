"""What the expert cache holds before the first step: nothing, random experts, or the hottest."""

import random
from collections.abc import Sequence

from tandem.core.registry import Registry
from tandem.policy.plan import Geometry

STARTS: Registry[list[int]] = Registry("start content")


@STARTS.register("heat")
def hottest(geometry: Geometry, set_sizes: Sequence[int], heat: Sequence[float]) -> list[int]:
    """Fill every set with the experts used most in earlier runs; ties at random."""
    order = list(range(len(heat)))
    random.Random(0).shuffle(order)
    order.sort(key=lambda key: -heat[key])
    return fill_sets(geometry, set_sizes, order)


@STARTS.register("random")
def random_start(geometry: Geometry, set_sizes: Sequence[int], heat: Sequence[float]) -> list[int]:
    """Fill every set with experts drawn at random, seed 0: DALI."""
    order = list(range(geometry.num_layers * geometry.num_experts))
    random.Random(0).shuffle(order)
    return fill_sets(geometry, set_sizes, order)


@STARTS.register("none")
def empty(geometry: Geometry, set_sizes: Sequence[int], heat: Sequence[float]) -> list[int]:
    """Return nothing: paper 2 starts with an empty cache."""
    return []


def fill_sets(geometry: Geometry, set_sizes: Sequence[int], order: Sequence[int]) -> list[int]:
    """Take keys in order while their sets have room."""
    room = list(set_sizes)
    chosen = []
    for key in order:
        set_id = key // geometry.num_experts if len(room) > 1 else 0
        if room[set_id]:
            room[set_id] -= 1
            chosen.append(key)
    return chosen
