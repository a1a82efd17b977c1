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
    """Return no keys: as in paper 2, the cache is empty at the start."""
    return []


@SIMULATED_STARTS.register("random")
def random_start(geometry: Geometry, set_sizes: list[int], heat: RoutingTrace | None) -> list[int]:
    """Return the keys of experts that fill every set, drawn at random with seed 0, as in DALI."""
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
    """Return the keys of experts that fill every set: the most used in `heat`, as in Fiddler.

    `heat` has the held-out sequences; None: no keys.
    """
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
    """Return the keys of all experts of the first layers, as many whole layers as fit.

    This is how llama.cpp and KTransformers place experts. All layers must share one set.
    """
    whole_layers = sum(set_sizes) // geometry.num_experts
    return list(range(min(whole_layers, geometry.num_layers) * geometry.num_experts))


def _layers_of_sets(geometry: Geometry, set_sizes: list[int]) -> list[tuple[int, int]]:
    if len(set_sizes) == 1:
        return [(0, geometry.num_layers)]
    return [(layer, layer + 1) for layer in range(geometry.num_layers)]
