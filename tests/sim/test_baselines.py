"""Tests of the papers' released code: HybriMoE's constants, paper 2's cache of some layers."""

from tandem.policy.assignment.baselines import HybriMoe
from tandem.policy.assignment.problem import LayerProblem, pipeline_seconds
from tandem.policy.plan import Geometry, LayerLoad
from tandem.sim.baselines import FirstTokenScore, IndexedCopyOnMiss, ReleasedHybriMoe


def test_released_hybrimoe_fetches_whatever_the_cpu_costs() -> None:
    slow_link = LayerProblem(
        layer=0, experts=(0, 1), tokens=(3, 3), cpu=(1e-6, 1e-6), gpu=(1e-3, 1e-3),
        wait=(-1.0, -1.0), scores=(0.0, 0.0), cpu_first=0.0, link=1.0, link_busy=0.0,
        max_fetches=8,
    )  # fmt: skip
    assert HybriMoe().assign(slow_link).fetch == []
    released = ReleasedHybriMoe().assign(slow_link)
    assert released.fetch == [0, 1]
    assert released[2:] == pipeline_seconds(slow_link, [0, 1], [])
    assert ReleasedHybriMoe(cpu_token=0.1).assign(slow_link).fetch == [0]


def test_released_score_reads_the_first_token_alone() -> None:
    score = FirstTokenScore(Geometry(1, 8, 2))
    score.touch(LayerLoad(0, (1, 2, 5), (1, 2, 1), (0.1, 1.5, 0.4), ((5, 2), (2, 1))))
    assert score.scores([1, 2, 5]) == [0.0, 0.25, 0.25]


def test_an_indexed_cache_copies_for_its_layers_alone() -> None:
    policy = IndexedCopyOnMiss(Geometry(4, 8, 2), quota=4)
    policy.begin_step(is_prefill=False)
    assert policy.candidates(2, [16, 17], []) == ()
    assert policy.candidates(1, [8, 9], []) == [8, 9]
    assert policy.candidates(0, [1, 2], []) == [1]  # one short of the quota, as its code counts
