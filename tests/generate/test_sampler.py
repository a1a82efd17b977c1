"""Tests of the sampler against plain definitions that sort everything."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.generate.sampler import Sampler
from tandem.generate.sampling import SamplingRule
from tandem.kernels._native import TokenSampler, available_isas

VOCABULARY = 3000


def logits_of(seed: int, rows: int = 1, width: int = VOCABULARY) -> torch.Tensor:
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(seed)) * 3


def allowed(scores: torch.Tensor, rule: SamplingRule) -> torch.Tensor:
    """Return the probabilities that a rule allows, by definition: sort, cut, normalise.

    Equal scores are kept or dropped together.
    """
    values, tokens = (scores / rule.temperature).sort(descending=True)
    if rule.top_k is not None:
        values = values[values >= values[: rule.top_k].min()]
    weights = values.double().softmax(0)
    keep = weights >= (rule.min_p or 0) * weights[0]
    if rule.top_p is not None:
        _, sizes = values.unique_consecutive(return_counts=True)
        firsts = (sizes.cumsum(0) - sizes).repeat_interleave(sizes)
        keep &= (weights.cumsum(0) - weights)[firsts] < rule.top_p
    weights = weights * keep
    left = torch.zeros(len(scores), dtype=torch.float64)
    return left.scatter(0, tokens[: len(weights)], weights / weights.sum())


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


def drawn(native: TokenSampler, scores: torch.Tensor, uniform: float) -> int:
    return native.choose(scores, None, uniform)


@settings(deadline=None, max_examples=150)
@given(
    seed=st.integers(0, 1000),
    isa=st.sampled_from(available_isas()),
    width=st.sampled_from([1, 5, 255, 256, 257, 1500, 5000]),
    spread=st.sampled_from([1e-3, 0.1, 1.0, 8.0]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    top_k=st.none() | st.integers(1, 6000),
    top_p=st.none() | st.floats(1e-6, 1),
    min_p=st.none() | st.floats(1e-6, 1),
)
def test_each_token_has_its_share_of_the_random_numbers(
    seed: int, isa: str, width: int, spread: float, dtype: torch.dtype, top_k: int | None,
    top_p: float | None, min_p: float | None,
) -> None:  # fmt: skip
    rule = SamplingRule(temperature=0.8, top_k=top_k, top_p=top_p, min_p=min_p)
    scores = (logits_of(seed, width=width)[0] * spread).to(dtype)
    native, expected = TokenSampler(isa, rule), allowed(scores.float(), rule)
    # Tokens are intervals from 0 to 1, as wide as their probability: the middle of one
    # draws it. Where the rule's cut meets a sum, a minimum or equal scores in the last
    # digits, one token more or fewer remains.
    ends = expected.cumsum(0)
    wide = expected.topk(min(40, width))
    narrowest = 2.1 * float(expected[expected > 0].min()) + 1e-5
    for weight, token in zip(wide.values.tolist(), wide.indices.tolist(), strict=True):
        if weight < 1e-4:  # sums are in fp32
            break
        middle = float(ends[token]) - weight / 2
        got = drawn(native, scores, middle)
        assert abs(float(ends[got] - ends[token])) <= max(weight, float(expected[got])) + narrowest
        assert expected[got] > 0 or scores[got] >= scores[expected == 0].max() - 1e-6


@pytest.mark.parametrize("isa", available_isas())
@pytest.mark.parametrize("top_p", [1e-6, 0.1, 0.5, 0.9, 0.999999])
@pytest.mark.parametrize("spread", [0.0, 1e-6, 0.3, 6.0])
def test_top_p_keeps_what_sorting_keeps(isa: str, top_p: float, spread: float) -> None:
    # The likeliest token is the last one, and the least likely remaining one is the first:
    # the ends of the random numbers show the cut.
    scores = (logits_of(7, width=20_000)[0] * spread).sort().values
    rule = SamplingRule(temperature=1.0, top_p=top_p)
    native = TokenSampler(isa, rule)
    weights = scores.double().softmax(0).flip(0)
    num_kept = int((weights.cumsum(0) - weights < top_p).sum())
    first = drawn(native, scores, 0.0)
    # fp32 sums know a share to about one in a million
    slack = 1 + round(2e-6 / float(weights[num_kept - 1]))
    equal = int(((scores - scores[first]).abs() < 2e-7).sum())  # in fp32 equally likely
    assert abs(len(scores) - first - num_kept) <= max(slack, equal)
    assert drawn(native, scores, 1 - 1e-12) >= len(scores) - 1 - int(top_p > 0.5)


@pytest.mark.parametrize("top_k", [1, 40, 1499, 1500, 2000])
def test_top_k_keeps_as_many(top_k: int) -> None:
    scores = logits_of(8, width=1500)[0].sort().values
    native = TokenSampler("", SamplingRule(temperature=9.0, top_k=top_k))
    first = drawn(native, scores, 0.0)
    assert first == max(0, 1500 - top_k)


@pytest.mark.parametrize("rule", [SamplingRule(), *RULES])
def test_what_is_forbidden_or_no_number_is_never_chosen(rule: SamplingRule) -> None:
    scores = torch.full((1, VOCABULARY), float("-inf"))
    scores[0, 50:60] = float("nan")
    scores[0, 70:73] = torch.tensor([1.0, 2.0, 2.0])
    tokens = Sampler(rule, 50, seed=2).choose(scores.expand(50, -1), [[]] * 50)
    assert set(tokens) <= {70, 71, 72}


@pytest.mark.parametrize("temperature", [1e-30, 1e30])
def test_extreme_temperatures_are_greedy_or_uniform(temperature: float) -> None:
    scores = torch.linspace(-3, 3, VOCABULARY)[None]
    rule = SamplingRule(temperature=temperature)
    tokens = set(Sampler(rule, 100, seed=3).choose(scores.expand(100, -1), [[]] * 100))
    assert tokens == {VOCABULARY - 1} if temperature < 1 else len(tokens) > 90


def test_a_growing_history_is_penalised_as_a_whole() -> None:
    scores = torch.zeros(1, 8)
    scores[0] = torch.arange(8, 0, -1)
    sampler, history, chosen = Sampler(SamplingRule(repetition_penalty=100.0), 1, None), [0], []
    for _ in range(7):
        history += sampler.choose(scores, [history])
        chosen.append(history[-1])
    assert chosen == [1, 2, 3, 4, 5, 6, 7]
