"""The sampler against plain definitions that sort everything."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.generate.sampler import Sampler, largest
from tandem.generate.sampling import SamplingRule
from tandem.kernels._native import keep_likeliest

VOCABULARY = 3000


def logits_of(seed: int, rows: int = 1, width: int = VOCABULARY) -> torch.Tensor:
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(seed)) * 3


def allowed(scores: torch.Tensor, rule: SamplingRule) -> torch.Tensor:
    """The probabilities that a rule leaves, by the definition: sort, cut, normalise."""
    values, tokens = (scores / rule.temperature).sort(descending=True)
    if rule.top_k is not None:
        values = values[: rule.top_k]
    weights = values.softmax(0)
    keep = weights >= (rule.min_p or 0) * weights[0]
    if rule.top_p is not None:
        keep &= weights.cumsum(0) - weights < rule.top_p
    weights = weights * keep
    return torch.zeros(len(scores)).scatter(0, tokens[: len(weights)], weights / weights.sum())


@settings(deadline=None)
@given(st.integers(0, 1000), st.integers(1, 400), st.sampled_from([5, 256, 257, 3000]))
def test_largest_are_those_of_topk(seed: int, k: int, width: int) -> None:
    scores = logits_of(seed, 2, width)
    k = min(k, width)
    values, places = largest(scores, k)
    assert torch.equal(values, scores.topk(k).values)
    assert torch.equal(scores.gather(1, places), values)


RULES = [
    SamplingRule(temperature=1.0),
    SamplingRule(temperature=0.7, top_k=5),
    SamplingRule(temperature=1.3, top_p=0.8),
    SamplingRule(temperature=3.0, top_p=0.99),  # a head of thousands
    SamplingRule(temperature=0.9, top_k=20, top_p=0.5),
    SamplingRule(temperature=1.0, min_p=0.1),
    SamplingRule(temperature=1.5, top_k=40, top_p=0.9, min_p=0.05),
]


@pytest.mark.parametrize("rule", RULES)
def test_draws_follow_the_probabilities_that_the_rule_leaves(rule: SamplingRule) -> None:
    scores, draws = logits_of(1)[0], 4000
    expected = allowed(scores, rule)
    # Rows draw independently: one call with many rows is many draws.
    tokens = Sampler(rule, draws, seed=5).choose(scores.expand(draws, -1), [[]] * draws)
    counts = torch.bincount(torch.tensor(tokens), minlength=VOCABULARY)
    assert counts[expected == 0].sum() == 0
    deviation = (counts - draws * expected).abs() / (draws * expected).clamp(min=1).sqrt()
    assert deviation.max() < 6


def test_greedy_takes_the_best() -> None:
    scores = logits_of(2, 3)
    assert Sampler(SamplingRule(), 3, None).choose(scores, [[]] * 3) == scores.argmax(-1).tolist()


def test_a_rows_draws_do_not_depend_on_other_rows() -> None:
    scores, rule = logits_of(3, 2), SamplingRule(temperature=2.0)
    both, alone = Sampler(rule, 2, seed=9), Sampler(rule, 1, seed=9)
    for _ in range(20):
        assert both.choose(scores, [[], []])[0] == alone.choose(scores[:1], [[]])[0]


def test_repetition_penalty_is_that_of_transformers() -> None:
    from transformers import RepetitionPenaltyLogitsProcessor

    scores, history = logits_of(4), [3, 7, 7, int(logits_of(4).argmax())]
    expected = RepetitionPenaltyLogitsProcessor(2.5)(torch.tensor([history]), scores.clone())
    chosen = Sampler(SamplingRule(repetition_penalty=2.5), 1, None).choose(scores, [history])
    assert chosen == expected.argmax(-1).tolist()
    assert chosen != scores.argmax(-1).tolist()


def test_scores_that_are_no_numbers_do_not_crash() -> None:
    broken = torch.full((1, VOCABULARY), float("nan"))
    for rule in (SamplingRule(), *RULES):
        (token,) = Sampler(rule, 1, seed=0).choose(broken, [[]])
        assert 0 <= token < VOCABULARY


@pytest.mark.parametrize("rule", [RULES[2], RULES[5], SamplingRule(temperature=1, top_p=1e-6)])
def test_equal_scores_stay_or_go_together(rule: SamplingRule) -> None:
    scores = torch.full((1, VOCABULARY), -9.0)
    scores[0, 100:200] = 4.0
    tokens = Sampler(rule, 500, seed=1).choose(scores.expand(500, -1), [[]] * 500)
    assert set(tokens) <= set(range(100, 200))
    assert len(set(tokens)) > 80


@settings(deadline=None)
@given(st.integers(0, 1000), st.floats(0.001, 0.999), st.sampled_from([0.1, 1.0, 8.0]))
def test_top_p_keeps_what_sorting_keeps(seed: int, top_p: float, width: float) -> None:
    weights = (logits_of(seed)[0] * width).softmax(0)
    kept = weights.clone()
    keep_likeliest(kept.data_ptr(), len(kept), top_p, 0.0)
    best = weights.double().sort(descending=True).values
    num_kept = int((best.cumsum(0) - best < top_p - 1e-9).sum())
    assert abs(int((kept > 0).sum()) - num_kept) <= 1  # where a sum meets top_p to the last digits
    assert torch.equal(kept[kept > 0], weights[weights >= kept[kept > 0].min()])
