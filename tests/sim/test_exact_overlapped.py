"""Tests of the optimum of overlapped copies, against all subsets and orders of copies."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings

from tandem.policy.assignment import LayerProblem
from tandem.policy.assignment.balanced import Balanced
from tandem.policy.assignment.problem import pipeline_seconds
from tandem.sim.exact_overlapped import (
    ExactOverlapped,
    overlapped_lower_bound,
    overlapped_optimal_seconds,
)
from tandem.sim.systems import POLICIES
from tests.policy.strategies import problems


def brute_force(given: LayerProblem) -> float:
    """Memory may lack a resident: it then stays on the GPU."""
    best = float("inf")

    def is_stuck(expert: int) -> bool:
        return given.is_on_disk(given.experts.index(expert))

    for on_gpu in itertools.product((False, True), repeat=len(given.cpu)):
        placed = list(zip(given.experts, given.wait, on_gpu, strict=True))
        fetch = [expert for expert, wait, taken in placed if wait < 0 and taken]
        spill = [expert for expert, wait, taken in placed if wait >= 0 and not taken]
        if len(fetch) > given.max_fetches or any(map(is_stuck, spill)):
            continue
        for order in itertools.permutations(fetch):
            best = min(best, max(pipeline_seconds(given, order, spill)))
    return best


@settings(max_examples=60)
@given(layer=problems(max_experts=5))
def test_exact_overlapped_equals_brute_force(layer: LayerProblem) -> None:
    expected = brute_force(layer)
    assert ExactOverlapped().assign(layer).seconds == pytest.approx(expected, rel=1e-9)
    assert overlapped_lower_bound(layer) <= expected * (1 + 1e-9)


@pytest.mark.parametrize("name", POLICIES.assignments.names())
@settings(max_examples=30)
@given(layer=problems())
def test_no_policy_beats_the_overlapped_optimum(name: str, layer: LayerProblem) -> None:
    split = POLICIES.assignments.factory(name)().assign(layer)
    seconds = max(pipeline_seconds(layer, split.fetch, split.spill))
    assert seconds >= ExactOverlapped().assign(layer).seconds * (1 - 1e-9)


@settings(max_examples=60)
@given(layer=problems(max_experts=5))
def test_balanced_is_optimal_where_every_expert_takes_the_gpu_as_long(layer: LayerProblem) -> None:
    flat = layer._replace(
        gpu=[layer.gpu[0]] * len(layer.gpu), wait=[min(wait, 0.0) for wait in layer.wait]
    )
    assert Balanced().assign(flat).seconds == pytest.approx(brute_force(flat), rel=1e-9)


@settings(max_examples=60)
@given(layer=problems(max_experts=5, over_disk=True))
def test_balanced_is_optimal_over_a_disk(layer: LayerProblem) -> None:
    """The CPU computes what is read for it while copies wait for reads of their own."""
    flat = layer._replace(
        gpu=[layer.gpu[0]] * len(layer.gpu), wait=[min(wait, 0.0) for wait in layer.wait]
    )
    split = Balanced().assign(flat)
    assert split.seconds == pytest.approx(brute_force(flat), rel=1e-9)
    seconds = pipeline_seconds(flat, split.fetch, split.spill)
    assert (split.gpu_seconds, split.cpu_seconds) == pytest.approx(seconds)


def test_64_experts_are_exact_and_more_have_a_bound() -> None:
    draw = np.random.default_rng(0)
    cpu, gpu = draw.uniform(1, 2, 65).tolist(), draw.uniform(0.1, 0.5, 65).tolist()
    wait = np.where(draw.uniform(size=65) < 0.5, 0.0, -1.0).tolist()
    most = LayerProblem(0, range(65), [2] * 65, cpu, gpu, wait, [0.0] * 65, 0.1, 1.0, 0.5, 1 << 30)
    layer = most._replace(experts=range(64), tokens=[2] * 64, cpu=cpu[:64], gpu=gpu[:64])
    layer = layer._replace(wait=wait[:64], scores=[0.0] * 64)
    best = ExactOverlapped().assign(layer).seconds
    assert overlapped_lower_bound(layer) <= best <= Balanced().assign(layer).seconds
    with pytest.raises(AssertionError, match="65 active experts"):
        ExactOverlapped().assign(most)
    assert 0 < overlapped_optimal_seconds(most) <= Balanced().assign(most).seconds
