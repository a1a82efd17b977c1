"""Tests of choosing among eviction rules: exact ghost caches, and bad rules are soon left."""

import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.policy.eviction import EVICTIONS
from tandem.policy.eviction.next_use import NextUse
from tandem.policy.eviction.rule_choice import (
    DECAYED,
    MARGIN,
    NEXT_USE,
    RECENCY,
    RULES,
    GhostCache,
    RuleChoice,
    Start,
)
from tandem.policy.plan import Geometry, LayerLoad
from tandem.sim.hit_rate import hit_rate

LAYER = Geometry(num_layers=1, num_experts=12, top_k=1)


def loads(sequence: list[int]) -> list[list[LayerLoad]]:
    return [[LayerLoad(0, (expert,), (1,), (), ((expert,),))] for expert in sequence]


@settings(max_examples=50)
@given(sequence=st.lists(st.integers(0, 11), min_size=1, max_size=80), slots=st.integers(1, 11))
def test_a_ghost_cache_of_lru_has_the_hits_of_lru(sequence: list[int], slots: int) -> None:
    ghost, last_use, hits = GhostCache(slots), [0] * 12, 0
    for step, expert in enumerate(sequence):
        last_use[expert] = step + 1
        hits += ghost.use([expert], last_use)
    expected = hit_rate(iter(loads(sequence)), LAYER, [slots], EVICTIONS.factory("lru")(LAYER))
    assert hits / len(sequence) == expected


def test_a_ghost_cache_neither_overflows_nor_evicts_what_is_in_use() -> None:
    draw, ghost = random.Random(0), GhostCache(4)
    for _ in range(200):
        experts = sorted(draw.sample(range(12), draw.randint(1, 7)))
        scores = [draw.randrange(5) for _ in range(12)]
        ghost.use(experts, scores)
        held = [expert for expert in range(12) if ghost.use([expert], [0] * 12)]
        assert len(held) <= 4


def test_a_rule_is_left_once_another_one_is_ahead_by_the_margin() -> None:
    start = Start()
    start.rule = NEXT_USE
    choice = RuleChoice(12, start)
    choice.resize(3)
    worst, best = [12 - e for e in range(12)], list(range(12))
    steps = 0
    while choice.choose() != RECENCY:
        # `best` keeps 9, 10 and 11, of which one is used in every step; `worst` keeps 0, 1 and 2.
        for expert in (0, 1, 2, 9, 10, 11) if steps == 0 else (9 + steps % 3,):
            choice.use([expert], [worst, best, worst], is_prompt=False)
        steps += 1
        assert steps < 3 * MARGIN
    assert RULES[choice.followed] == "lru"


def test_lru_is_left_for_hits_that_are_no_chance_in_all_layers_together() -> None:
    start = Start()
    for step in range(2000):
        start.weigh([5 + (-1) ** step, 5, 5])  # as many more hits as fewer ones
    assert start.rule == RECENCY
    start = Start()
    choices = [RuleChoice(12, start) for _ in range(8)]
    for choice in choices:
        choice.resize(3)
    for _ in range(30):
        start.weigh([5, 5, 4])  # earlier losses do not count
    for _ in range(49):
        start.weigh([5, 5, 6])
    assert {choice.choose() for choice in choices} == {RECENCY}
    start.weigh([5, 5, 6])
    assert {choice.choose() for choice in choices} == {DECAYED}


def test_the_hits_of_prompts_move_no_start() -> None:
    start = Start()
    choice = RuleChoice(12, start)
    choice.resize(3)
    worst, best = [12 - e for e in range(12)], list(range(12))
    for step in range(200):
        choice.use([9 + step % 3, step % 3], [best, worst, worst], is_prompt=True)
        assert choice.choose() == RECENCY
    for step in range(200):
        choice.use([9 + step % 3], [best, worst, worst], is_prompt=False)
        choice.choose()
    assert choice.followed == NEXT_USE


@pytest.mark.parametrize("batch", [1, 8])
def test_a_cold_start_is_lru_where_nothing_is_to_be_learned(batch: int) -> None:
    """Tokens keep some experts of the token before; prediction adds only noise."""
    geometry, draw = Geometry(num_layers=2, num_experts=64, top_k=4), random.Random(batch)
    routes = [[draw.sample(range(64), 4) for _ in range(batch)] for _ in range(2)]
    steps = []
    for _ in range(400):
        step = []
        for layer in range(2):
            for at, route in enumerate(routes[layer]):
                kept = [expert for expert in route if draw.random() < 0.2]
                others = [expert for expert in draw.sample(range(64), 8) if expert not in kept]
                routes[layer][at] = [*kept, *others[: 4 - len(kept)]]
            tokens = Counter(expert for route in routes[layer] for expert in route)
            experts = tuple(sorted(tokens))
            now = tuple(tuple(route) for route in routes[layer])
            step.append(LayerLoad(layer, experts, tuple(tokens[e] for e in experts), (), now))
        steps.append(step)
    for slots in (16, 32, 48):
        lru = EVICTIONS.factory("lru")(geometry)
        rates = [hit_rate(iter(steps), geometry, [slots] * 2, p) for p in (NextUse(geometry), lru)]
        assert rates[0] == rates[1]


@pytest.mark.parametrize("capacity", [0, 12])
def test_nothing_is_chosen_where_rules_cannot_differ(capacity: int) -> None:
    choice = RuleChoice(12, Start())
    choice.resize(capacity)
    assert not choice.is_open
    assert choice.followed == NEXT_USE


def test_a_loop_that_only_lru_holds_costs_little() -> None:
    """Ten experts in turn and two at random: prediction alone loses LRU's hits."""
    draw = random.Random(1)
    sequence = [(step % 10) if step % 7 else 10 + draw.randrange(2) for step in range(3000)]
    for slots in (4, 8, 11):
        policy = NextUse(LAYER)
        ours = hit_rate(iter(loads(sequence)), LAYER, [slots], policy)
        lru = hit_rate(iter(loads(sequence)), LAYER, [slots], EVICTIONS.factory("lru")(LAYER))
        assert ours >= lru - 0.01
        assert policy.rule(0) in RULES


def test_a_pool_that_layers_share_follows_predicted_next_use() -> None:
    geometry = Geometry(num_layers=2, num_experts=12, top_k=1)
    policy = NextUse(geometry)
    policy.resized([7])
    assert [policy.rule(layer) for layer in range(2)] == ["next-use"] * 2
