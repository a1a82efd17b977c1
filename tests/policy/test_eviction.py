"""Tests of each eviction policy by its own rule, and DALI's worked example."""

import pytest

from tandem.policy.eviction.baselines import (
    CopyOnMiss,
    DaliWindow,
    Fifo,
    HybriMoeScore,
    Lfu,
    Lru,
)
from tandem.policy.eviction.next_use import NextUse
from tandem.policy.plan import Geometry, LayerLoad

ONE_LAYER = Geometry(num_layers=1, num_experts=8, top_k=2)


def load(*experts: int, tokens: tuple[int, ...] = (), weights: tuple[float, ...] = ()) -> LayerLoad:
    return LayerLoad(0, experts, tokens or (1,) * len(experts), weights)


def test_lru_ranks_by_last_use() -> None:
    policy = Lru(ONE_LAYER)
    for experts in ((1, 2), (3,), (1,)):
        policy.begin_step(is_prefill=False)
        policy.touch(load(*experts))
    assert policy.scores([1, 2, 3, 4]) == [3, 1, 2, -1]


def test_fifo_ranks_by_arrival_and_lfu_by_tokens() -> None:
    fifo, lfu = Fifo(ONE_LAYER), Lfu(ONE_LAYER)
    for key in (5, 2):
        fifo.inserted(key)
    assert fifo.scores([2, 5]) == [2, 1]
    lfu.touch(load(1, 2, tokens=(4, 1)))
    lfu.touch(load(2, tokens=(2,)))
    assert lfu.scores([1, 2, 3]) == [4, 3, 0]


def test_dali_window_follows_figure_11() -> None:
    # 8 experts, cache_size 4, w_size 4, u_size 2: after four steps the two best absent experts
    # replace the two worst residents, and scores start again.
    policy = DaliWindow(ONE_LAYER, window=4, swaps=2)
    slot_of = [0, 1, 2, 3, -1, -1, -1, -1]  # experts 0..3 are on the GPU
    for experts in ((0, 4), (0, 5), (1, 4)):
        policy.touch(load(*experts))
        assert policy.candidates(0, [], slot_of) == ()
    policy.touch(load(4, 5, 6, tokens=(1, 2, 1)))
    assert policy.scores([0, 1, 2, 3]) == [2, 1, 0, 0]
    assert policy.candidates(0, [], slot_of) == [4, 5]  # both 3: the lower id first
    assert policy.admits(3, 0)
    assert not policy.admits(2, 2)
    policy.touch(load(7))
    assert policy.scores([0, 4, 7]) == [0, 0, 1]


def test_dali_window_counts_in_decode_only() -> None:
    policy = DaliWindow(ONE_LAYER, window=1, swaps=1)
    policy.begin_step(is_prefill=True)
    policy.touch(load(4))
    assert policy.candidates(0, [4], [-1] * 8) == ()


def test_hybrimoe_score_is_a_moving_average_of_router_scores() -> None:
    policy = HybriMoeScore(ONE_LAYER, alpha=0.5)
    policy.touch(load(0, 1, weights=(0.75, 0.25)))
    policy.touch(load(1, weights=(1.0,)))
    assert policy.scores([0, 1, 2]) == pytest.approx([0.1875, 0.5625, 0.0])


def test_copy_on_miss_keeps_to_its_quota() -> None:
    policy = CopyOnMiss(ONE_LAYER, quota=3)
    policy.begin_step(is_prefill=False)
    assert policy.candidates(0, [1, 2, 3, 4], []) == [1, 2]
    assert policy.candidates(0, [5], []) == []
    policy.begin_step(is_prefill=True)
    assert policy.candidates(0, [1], []) == []


def test_next_use_learns_what_follows() -> None:
    policy = NextUse(ONE_LAYER)
    for _ in range(300):
        for expert in (0, 3, 6, 1, 4, 7, 2, 5):
            policy.begin_step(is_prefill=False)
            policy.touch(load(expert))
    policy.begin_step(is_prefill=False)
    policy.touch(load(0))
    scores = policy.scores(list(range(8)))
    ranking = sorted(range(8), key=lambda expert: -scores[expert])
    assert ranking[:4] == [3, 6, 1, 4]


def test_next_use_counts_a_prompt_as_one_sequence_among_those_that_run() -> None:
    def scores_after(batch: int) -> list[float]:
        policy = NextUse(ONE_LAYER)
        for _ in range(3):
            policy.begin_step(is_prefill=False)
            policy.touch(LayerLoad(0, (0,), (batch,), (), ((0,),) * batch))
        policy.begin_step(is_prefill=True)
        policy.touch(LayerLoad(0, (6, 7), (8, 1), (), ((6,),) * 8 + ((7,),)))
        return policy.scores([0, 6])

    alone, busy = scores_after(1), scores_after(16)
    assert alone[1] > alone[0]  # the prompt's busy expert, against what ran before
    assert busy[1] < busy[0]


def test_next_use_survives_many_experts_and_long_runs() -> None:
    geometry = Geometry(num_layers=2, num_experts=512, top_k=10)
    policy = NextUse(geometry)
    everyone = tuple(range(512))
    for step in range(40):
        policy.begin_step(is_prefill=step == 0)
        for layer in range(2):
            policy.touch(LayerLoad(layer, everyone, (3,) * 512))
    assert len(set(policy.scores(list(range(512))))) == 1
