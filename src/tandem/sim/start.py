"""What the expert cache holds before the first step."""

import random
from collections.abc import Callable

import numpy as np

from tandem.core.registry import Registry
from tandem.policy.plan import Geometry
from tandem.trace import RoutingTrace

Start = Callable[[Geometry, list[int], RoutingTrace | None], list[int]]
SIMULATED_STARTS: Registry[list[int]] = Registry("start content")


@SIMULATED_STARTS.register("empty")
def empty(geometry: Geometry, set_sizes: list[int], heat: RoutingTrace | None) -> list[int]:
    """Return nothing: paper 2 starts with an empty cache."""
    return []


@SIMULATED_STARTS.register("random")
def random_start(geometry: Geometry, set_sizes: list[int], heat: RoutingTrace | None) -> list[int]:
    """Fill every set with experts drawn at random, seed 0: DALI."""
    draw = random.Random(0)
    layers = _layers_of_sets(geometry, set_sizes)
    experts = geometry.num_experts
    resident: list[int] = []
    for size, (first, last) in zip(set_sizes, layers, strict=True):
        keys = range(first * experts, last * experts)
        resident += draw.sample(keys, min(size, len(keys)))
    return resident


@SIMULATED_STARTS.register("hottest")
def hottest(geometry: Geometry, set_sizes: list[int], heat: RoutingTrace | None) -> list[int]:
    """Fill every set with the experts used most in the held-out sequences: Fiddler's popularity."""
    if heat is None:
        return []
    experts = geometry.num_experts
    first_keys = (np.arange(geometry.num_layers) * experts)[None, :, None]
    keys = (heat.experts + first_keys).ravel()
    counts = np.bincount(keys, minlength=geometry.num_layers * experts)
    resident: list[int] = []
    for size, (first, last) in zip(set_sizes, _layers_of_sets(geometry, set_sizes), strict=True):
        own = counts[first * experts : last * experts]
        best = np.argsort(-own, kind="stable")[:size]
        resident += (first * experts + best).tolist()
    return resident


@SIMULATED_STARTS.register("first-layers")
def first_layers(geometry: Geometry, set_sizes: list[int], heat: RoutingTrace | None) -> list[int]:
    """Fill a shared pool with the first layers, each whole, as llama.cpp and KTransformers do."""
    whole_layers = sum(set_sizes) // geometry.num_experts
    return list(range(min(whole_layers, geometry.num_layers) * geometry.num_experts))


def _layers_of_sets(geometry: Geometry, set_sizes: list[int]) -> list[tuple[int, int]]:
    if len(set_sizes) == 1:
        return [(0, geometry.num_layers)]
    return [(layer, layer + 1) for layer in range(geometry.num_layers)]
