"""Tests of every assignment policy: valid, deterministic, bounds, the papers' examples."""

import itertools
from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings

from tandem.policy.assignment import ASSIGNMENTS, IN_GRAPH, LayerProblem
from tandem.policy.assignment.balanced import Balanced
from tandem.policy.assignment.baselines import Dali, HybriMoe
from tandem.policy.assignment.in_graph import BalancedInGraph, Published, in_graph_seconds
from tandem.policy.assignment.problem import (
    all_on_cpu,
    equation_gpu,
    equation_seconds,
    pipeline_seconds,
    priced,
)
from tandem.policy.settings import FETCHING_RULE
from tandem.sim.exact import Exact, lower_bound
from tandem.sim.systems import POLICIES
from tests.policy.strategies import problems


def problem(
    cpu: list[float],
    gpu: list[float],
    wait: list[float],
    link: float = 4.0,
    max_fetches: int = 1 << 30,
    tokens: list[int] | None = None,
    **more: float,
) -> LayerProblem:
    count = len(cpu)
    return LayerProblem(
        layer=0,
        experts=list(range(count)),
        tokens=tokens or [2] * count,
        cpu=cpu,
        gpu=gpu,
        wait=wait,
        scores=[0.0] * count,
        cpu_first=more.get("cpu_first", 0.0),
        link=link,
        link_busy=more.get("link_busy", 0.0),
        max_fetches=max_fetches,
        cpu_slowdown=more.get("cpu_slowdown", 1.0),
        link_slowdown=more.get("link_slowdown", 1.0),
    )


def brute_force(given: LayerProblem) -> float:
    t_gpu, best = equation_gpu(given), float("inf")
    for on_gpu in itertools.product((False, True), repeat=len(given.cpu)):
        fetches = sum(on and wait < 0 for on, wait in zip(on_gpu, given.wait, strict=True))
        if fetches <= given.max_fetches:
            gpu = sum(t for on, t in zip(on_gpu, t_gpu, strict=True) if on)
            cpu = sum(t for on, t in zip(on_gpu, given.cpu, strict=True) if not on)
            best = min(best, max(gpu, cpu))
    return best


FETCH_NOTHING = {"cpu-only", "layer-static", "ready-on-gpu"}


@pytest.mark.parametrize("name", POLICIES.assignments.names())
@given(layer=problems())
def test_split_is_sound_and_deterministic(name: str, layer: LayerProblem) -> None:
    policy = POLICIES.assignments.factory(name)()
    split = policy.assign(layer)
    absent = {e for e, wait in zip(layer.experts, layer.wait, strict=True) if wait < 0}
    assert len(set(split.fetch)) == len(split.fetch) <= layer.max_fetches
    assert set(split.fetch) <= absent
    assert len(set(split.spill)) == len(split.spill)
    assert set(split.spill) <= set(layer.experts) - absent
    seconds = pipeline_seconds if policy.pipelined else equation_seconds
    if name in FETCH_NOTHING:  # and include no copies under way for other layers
        layer = layer._replace(cpu_slowdown=1.0, link_slowdown=1.0)
    expected = seconds(layer, split.fetch, split.spill)
    if name == FETCHING_RULE:  # whose fetches are computed after everything else
        fetch = [layer.experts.index(expert) for expert in split.fetch]
        expected = in_graph_seconds(layer, Published.of(layer), fetch)
    assert (split.gpu_seconds, split.cpu_seconds) == pytest.approx(expected)
    assert policy.assign(layer) == split


@given(layer=problems())
def test_exact_equals_brute_force(layer: LayerProblem) -> None:
    assert Exact().assign(layer).seconds == pytest.approx(brute_force(layer), rel=1e-9)
    assert lower_bound(layer) <= brute_force(layer) * (1 + 1e-9)


@pytest.mark.parametrize("name", POLICIES.assignments.names())
@given(layer=problems())
def test_no_policy_beats_the_exact_optimum(name: str, layer: LayerProblem) -> None:
    split = POLICIES.assignments.factory(name)().assign(layer)
    seconds = max(equation_seconds(layer, split.fetch, split.spill))
    assert seconds >= Exact().assign(layer).seconds * (1 - 1e-9)


@pytest.mark.parametrize("name", ["balanced", "ratio-split", "dali", "exact", "exact-overlapped"])
@given(layer=problems())
def test_never_worse_than_all_on_the_cpu(name: str, layer: LayerProblem) -> None:
    policy = POLICIES.assignments.factory(name)()
    spill = all_on_cpu(layer, pipelined=policy.pipelined).spill
    cpu_only = priced(layer, [], spill, pipelined=policy.pipelined)
    unlimited = layer._replace(max_fetches=1 << 30)
    assert policy.assign(unlimited).seconds <= cpu_only.seconds * (1 + 1e-9)


@settings(max_examples=50)
@given(layer=problems())
def test_balanced_is_optimal_where_gpu_time_does_not_depend_on_tokens(layer: LayerProblem) -> None:
    flat = layer._replace(
        gpu=[layer.gpu[0]] * len(layer.gpu), wait=[min(wait, 0.0) for wait in layer.wait]
    )
    by_equations = Balanced(pipelined=False).assign(flat).seconds
    assert by_equations == pytest.approx(brute_force(flat), rel=1e-9)


@pytest.mark.parametrize("name", IN_GRAPH)
@given(layer=problems())
def test_in_one_graph_hits_are_the_gpus_and_copies_under_way_are_misses(
    name: str, layer: LayerProblem
) -> None:
    split = ASSIGNMENTS.factory(name)().assign(layer)
    under_way = [e for e, wait in zip(layer.experts, layer.wait, strict=True) if wait > 0]
    assert list(split.spill) == under_way


@given(layer=problems(max_experts=6))
def test_balanced_in_graph_is_optimal_where_gpu_time_does_not_depend_on_tokens(
    layer: LayerProblem,
) -> None:
    layer = layer._replace(gpu=[layer.gpu[0]] * len(layer.gpu))
    published = Published.of(layer)
    best = min(
        max(in_graph_seconds(layer, published, fetch))
        for count in range(min(len(published.absent), layer.max_fetches) + 1)
        for fetch in itertools.combinations(published.absent, count)
    )
    assert BalancedInGraph().assign(layer).seconds == pytest.approx(best, rel=1e-12)


def test_balanced_in_graph_weighs_each_copy_against_the_cpus_share() -> None:
    cpu, wait = [5.0, 9.0, 9.0, 4.0], [0.0, -1.0, -1.0, 0.3]
    layer = problem(cpu, [1.0] * 4, wait, link=2.0, cpu_first=0.5, link_busy=1.0)
    published = Published.of(layer)
    # The hit ends at 1, copies at 3 and 5. The expert under way is the CPU's in any case.
    # Fetched experts are computed after all of that, together.
    assert in_graph_seconds(layer, published, ()) == (1.0, 22.5)
    assert in_graph_seconds(layer, published, (1,)) == (14.5, 13.5)
    assert in_graph_seconds(layer, published, (1, 2)) == (7.0, 4.5)
    split = BalancedInGraph().assign(layer)
    assert (split.fetch, split.spill, split.seconds) == ([1, 2], [3], 7.0)


@pytest.mark.parametrize(("copy_wake", "seconds"), [(0.5, 7.5), (1.5, 9.0), (20.0, 22.5)])
def test_in_one_graph_a_thread_wakes_up_before_the_copies_and_after_them(
    copy_wake: float, seconds: float
) -> None:
    cpu, wait = [5.0, 9.0, 9.0, 4.0], [0.0, -1.0, -1.0, 0.3]
    layer = problem(cpu, [1.0] * 4, wait, link=2.0, cpu_first=0.5, link_busy=1.0)
    layer = layer._replace(copy_wake=copy_wake)
    # Two copies from when the thread is awake and the link is free, then two experts of 1.
    assert BalancedInGraph().assign(layer).seconds == seconds


def test_in_one_graph_copies_are_as_fast_as_the_link_where_the_cpu_has_nothing() -> None:
    layer = problem([9.0] * 2, [1.0] * 2, [-1.0] * 2, link=4.0, link_slowdown=2.0)
    published = Published.of(layer)
    assert in_graph_seconds(layer, published, (0,)) == (10.0, 9.0)
    assert in_graph_seconds(layer, published, (0, 1)) == (6.0, 0.0)  # two copies of 2, then two


def test_dali_in_graph_line_by_line() -> None:
    # Expert 0 is a hit: T_gpu begins with .5. Of the others t_gpu = max(4, .5), t_cpu = 2, 9, 5.
    layer = problem([3.0, 2.0, 9.0, 5.0], [0.5] * 4, [0.0, -1.0, -1.0, -1.0])
    # |t_gpu - t_cpu| = 2, 5, 1 -> order 2, 1, 3.  2: .5 + 4 <= 9 -> GPU (4.5).
    # 1: 4.5 + 4 <= 2 is false -> CPU (2).  3: 4.5 + 4 <= 2 + 5 is false -> CPU (7).
    split = ASSIGNMENTS.factory("dali-in-graph")().assign(layer)
    assert split.fetch == [2]
    assert (split.gpu_seconds, split.cpu_seconds) == (4.5, 7.0)


def test_exact_handles_64_experts_of_irregular_times() -> None:
    draw = np.random.default_rng(0)
    cpu, gpu = draw.uniform(1, 2, 64), draw.uniform(0.1, 0.5, 64)
    wait = np.where(draw.uniform(size=64) < 0.5, 0.0, -1.0)
    layer = problem(cpu.tolist(), gpu.tolist(), wait.tolist(), link=1.0)
    best = Exact().assign(layer).seconds
    assert lower_bound(layer) <= best <= Balanced(pipelined=False).assign(layer).seconds


def test_dali_algorithm_1_line_by_line() -> None:
    # Expert 0 is cached, the others are not: t_gpu = max(4, .5), line 3; t_cpu = 3, 2, 9, 5.
    layer = problem([3.0, 2.0, 9.0, 5.0], [0.5] * 4, [0.0, -1.0, -1.0, -1.0])
    assert equation_gpu(layer) == [0.5, 4.0, 4.0, 4.0]
    # Line 5: |t_gpu - t_cpu| = 2.5, 2, 5, 1 -> order 2, 0, 1, 3.
    # 2: 0 + 4 <= 0 + 9 -> GPU (T_gpu 4).   0: 4 + .5 <= 0 + 3 is false -> CPU (T_cpu 3).
    # 1: 4 + 4 <= 3 + 2 is false -> CPU (5). 3: 4 + 4 <= 5 + 5 -> GPU (8).
    split = Dali().assign(layer)
    assert split.fetch == [2, 3]
    assert split.spill == [0]
    assert (split.gpu_seconds, split.cpu_seconds) == (8.0, 5.0)


def test_dali_gives_ties_to_the_gpu_and_to_the_lower_position() -> None:
    layer = problem([4.0, 4.0], [1.0, 1.0], [-1.0, -1.0])
    assert Dali().assign(layer).fetch == [0]


def test_hybrimoe_pointers_meet() -> None:
    # Order: cached 1 (load 3), cached 0 (load 1), absent 2 (load 5), absent 3 (load 2).
    layer = problem(
        [1.0, 3.0, 5.0, 2.0], [0.5] * 4, [0.0, 0.0, -1.0, -1.0], tokens=[1, 3, 5, 2], cpu_first=0.5
    )
    # 1: .5 <= 2.5 GPU .5.  0: 1 <= 2.5 GPU 1.  2: 1 + .5 + 3 (waits for its copy) <= 2.5 is false:
    # the back, 3, goes to the CPU (2.5).  2: 4.5 <= 2.5 + 5 GPU.
    split = HybriMoe().assign(layer)
    assert split.fetch == [2]
    assert split.spill == []
    assert (split.gpu_seconds, split.cpu_seconds) == (4.5, 2.5)


def test_balanced_starts_the_first_fetch_while_the_next_is_copied() -> None:
    layer = problem([5.0, 5.0, 5.0], [1.0] * 3, [-1.0] * 3, link=2.0)
    split = Balanced().assign(layer)
    assert len(split.fetch) == 2
    assert (split.gpu_seconds, split.cpu_seconds) == (5.0, 5.0)


def test_balanced_waits_for_a_prefetch_in_flight_only_if_it_pays() -> None:
    soon = problem([3.0, 1.0], [0.5, 0.5], [0.4, -1.0])
    assert Balanced().assign(soon).spill == []
    late = problem([3.0, 1.0], [0.5, 0.5], [30.0, -1.0])
    assert Balanced().assign(late).spill == [0]


def test_balanced_fetches_what_the_cache_wants_among_equals() -> None:
    layer = problem([5.0] * 3, [0.1] * 3, [-1.0] * 3)._replace(scores=[0.0, 2.0, 1.0])
    assert Balanced().assign(layer).fetch == [1, 2]


def test_equation_9_limits_fetches() -> None:
    layer = problem([9.0] * 4, [0.1] * 4, [-1.0] * 4, link=1.0, max_fetches=1)
    for name in POLICIES.assignments:
        assert len(POLICIES.assignments.factory(name)().assign(layer).fetch) <= 1


@pytest.mark.parametrize("tokens", [1, 2])
def test_balanced_knows_that_copies_slow_the_cpu_and_the_cpu_copies(tokens: int) -> None:
    cpu, gpu, wait = [8.0] * 6, [0.5] * 6, [-1.0] * 6
    of = partial(problem, tokens=[tokens] * 6)
    free = Balanced().assign(of(cpu, gpu, wait, link=4.0))
    assert (len(free.fetch), free.seconds) == (4, 16.5)
    # Copies of 4 seconds take 2.5 while the CPU has nothing to do.
    shared = of(cpu, gpu, wait, link=4.0, cpu_slowdown=1.6, link_slowdown=1.6)
    alone = Balanced().assign(shared)
    assert len(alone.fetch) == 6
    assert alone.cpu_seconds == 0.0
    assert alone.gpu_seconds == pytest.approx(6 * 2.5 + 0.5)
    # With nothing to copy, nothing is slowed.
    resident = of(cpu, [9.0] * 6, [0.0] * 6, cpu_slowdown=1.6, link_slowdown=1.6)
    assert Balanced().assign(resident).cpu_seconds % 8.0 == 0.0
