"""Tests that routers are run ahead over the disk: the reference's predictions, memory's bits."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import tandem
from tandem.decode.cpu_slots import CpuSlotPool
from tandem.hf.lookahead.linear_routers import scored
from tandem.hf.lookahead.residuals import Residuals
from tandem.kernels import _native
from tandem.kernels.dense import CpuThreads, pack_dense
from tandem.kernels.formats.weight_format import find_format
from tandem.policy import reads
from tandem.policy.reads import CERTAIN, LikelyExpert
from tests.disk.loading import EXPERTS, LAYERS, TOP_K, packed_model, slots_of, with_share
from tests.inside import runtime_in

HIDDEN, SCORINGS = 64, ("", "sigmoid", "sqrtsoftplus")


@given(
    likely=st.lists(st.tuples(st.integers(0, 99), st.integers(0, 5)), max_size=20),
    chances=st.lists(st.integers(0, CERTAIN), min_size=6, max_size=6),
    numbers=st.tuples(st.integers(0, 40), st.integers(0, 70)),
)
def test_likely_experts_are_read_alike(
    likely: list[tuple[int, int]], chances: list[int], numbers: tuple[int, int]
) -> None:
    num_shared, step = numbers
    found = _native.likely_reads(likely, chances, num_shared)
    assert found == reads.likely_reads([LikelyExpert(*one) for one in likely], chances, num_shared)
    assert len(found) <= num_shared // 4
    assert _native.may_look_ahead(chances, step) == reads.may_look_ahead(chances, step)
    for was_used in (False, True):
        chance = reads.updated_chance(chances[0], was_used=was_used)
        assert _native.updated_chance(chances[0], was_used) == chance
        assert 0 <= chance <= CERTAIN


def test_chances_follow_what_is_used() -> None:
    """From the first chance to never read within some experts, and back."""
    chance, steps = reads.FIRST_CHANCE, 0
    while reads.likely_reads([LikelyExpert(7, 0)], [chance], 32):
        chance, steps = reads.updated_chance(chance, was_used=False), steps + 1
    assert 5 < steps < 50
    for _ in range(steps):
        chance = reads.updated_chance(chance, was_used=True)
    assert reads.likely_reads([LikelyExpert(7, 0)], [chance], 32) == [7]


@pytest.mark.parametrize("num_tokens", [1, 5, 50])
@pytest.mark.parametrize("scoring", SCORINGS)
@pytest.mark.parametrize("has_bias", [False, True])
def test_predictions_are_those_of_the_routers_with_residuals(
    scoring: str, has_bias: bool, num_tokens: int
) -> None:
    """Native residual vectors are those of `Residuals`, and so are the experts."""
    torch.manual_seed(num_tokens)
    weights = [torch.randn(EXPERTS, HIDDEN).bfloat16().float() / 8 for _ in range(3)]
    biases = [torch.randn(EXPERTS) if has_bias else None for _ in range(3)]
    packed = [pack_dense(weight, None, find_format("bf16")) for weight in weights]
    native = _native.LookAhead(
        [
            (one.native, [] if bias is None else bias.tolist(), SCORINGS.index(scoring))
            for one, bias in zip(packed, biases, strict=True)
        ],
        HIDDEN,
    )
    threads, expected = CpuThreads(), Residuals(3, HIDDEN)
    for _ in range(4):
        hidden = [torch.randn(num_tokens, HIDDEN) + layer for layer in range(3)]
        for layer in range(3):
            native.learn(layer, hidden[layer])
            if layer > 0:  # as the native one: from the last tokens of a prompt
                expected.learn(layer - 1, hidden[layer - 1][-32:], hidden[layer][-32:])
            found = native.predict(threads.dense, layer, hidden[layer], TOP_K)
            if layer == 2:
                assert found == []
                continue
            logits = scored((hidden[layer] + expected.means[layer]) @ weights[layer + 1].T, scoring)
            bias = biases[layer + 1]
            choice = (logits if bias is None else logits + bias).topk(TOP_K).indices
            equal = torch.tensor(found).view(num_tokens, TOP_K) == choice
            assert equal.float().mean() > 0.8  # near ties, as the kernel reads bf16


@given(
    steps=st.lists(
        st.tuples(st.integers(1, 2), st.sampled_from([0.1, 0.2, 0.3])), min_size=40, max_size=200
    ),
    kept=st.integers(0, 600),
)
def test_trials_decide_alike(steps: list[tuple[int, float]], kept: int) -> None:
    native, reference = _native.LookAheadTrial(), reads.LookAheadTrial()
    for num_tokens, seconds in [*steps, *[(1, 0.1)] * kept, *steps]:
        assert native.looks() == reference.looks
        native.end_step(num_tokens, seconds)
        reference.end_step(num_tokens, seconds)


@pytest.mark.parametrize("is_faster", [True, False])
def test_what_is_faster_is_kept_until_the_next_trial(is_faster: bool) -> None:
    trial, looked = reads.LookAheadTrial(), []
    for _ in range(1 + 32 + 512 + 32):
        looked.append(trial.looks)
        trial.end_step(1, 0.1 if trial.looks == is_faster else 0.11)
    assert set(looked[33:545]) == {is_faster}
    assert looked[545:] == looked[1:33]


def pool_of(model: Any) -> CpuSlotPool:
    """Return a pool whose steps of one token are replayed and look ahead without a trial."""
    if (slots := runtime_in(model).host_slots) is not None:
        slots.native.look_always()
    pool = CpuSlotPool(model, runtime_in(model).threads, 1)
    pool.prefill({0: [50, 51, 52]})
    while not pool.step.is_replaying:
        pool.decode({0: 53})
    return pool


@pytest.mark.parametrize("share", [0.0, 0.3, 0.8])
@pytest.mark.parametrize("kind", ["right", "wrong", "own"])
@pytest.mark.parametrize("delay", [0.0, 0.002])
def test_steps_have_the_bits_of_memory_whatever_is_predicted(
    packed: Path, in_memory: Any, share: float, kind: str, delay: float
) -> None:
    """Right ones are used, wrong ones soon no longer read."""
    model = with_share(packed, share)
    pool, whole, native = pool_of(model), pool_of(in_memory), slots_of(model).native
    assert slots_of(model).looks_ahead
    native.fail(0, 2 if delay else 0, delay)
    chosen: list[list[int]] = []
    runtime_in(in_memory).executor.listeners.append(
        lambda event: chosen.append(event.chosen[0].tolist())
    )
    reads_of_steps, first = [], native.counts()
    for token in range(20, 120):
        before = native.counts()
        chosen.clear()
        expected = whole.decode({0: token}).clone()
        wrong = [[e for e in range(EXPERTS) if e not in one][:TOP_K] for one in chosen]
        if kind != "own":
            native.script(chosen if kind == "right" else wrong)
        assert torch.equal(pool.decode({0: token}), expected)
        counts = native.counts()
        reads_of_steps.append(counts.likely - before.likely)
        if kind == "right" and share == 0.0 and token > 20:
            assert counts.misses - before.misses <= TOP_K + 1  # the first layer's
    runtime_in(in_memory).executor.listeners.pop()
    counts = native.counts()
    assert counts.likely_used <= counts.likely
    if kind == "right":
        assert counts.likely_used > 100 * (LAYERS - 1) * TOP_K * (1 - share) / 4
    if kind == "wrong":
        assert counts.likely_used == first.likely_used
        assert sum(reads_of_steps[-30:]) == 0


def test_what_was_under_way_when_it_was_used_gets_a_slot(packed: Path) -> None:
    """Reads last long: an expert that was predicted is still being read when it is used."""
    model = with_share(packed, 0.5)
    pool, native = pool_of(model), slots_of(model).native
    native.fail(0, 1, 0.002)
    before = Counter(native.resident(1))
    for token in range(70, 110):
        native.script([[], list(range(TOP_K, 2 * TOP_K))])
        pool.decode({0: token})
    assert native.counts().likely > 0
    assert len(native.resident(1)) == EXPERTS // 2
    assert Counter(native.resident(1)) != before


def test_a_router_that_cannot_be_run_ahead_changes_nothing(
    packed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "tandem.hf.lookahead.over_disk.find_routers", lambda *_, **__: "it has no router"
    )
    model = with_share(packed, 0.3)
    pool = pool_of(model)
    before = slots_of(model).native.counts().likely
    for token in range(60, 70):
        pool.decode({0: token})
    assert slots_of(model).native.counts().likely == before == 0


def test_routers_by_token_are_not_run_ahead(tmp_path: Path) -> None:
    """DeepSeek-V4's first layers choose by token id; the others' routers are run ahead."""
    kinds = ["hash_moe"] * 2 + ["moe"] * 2
    model = with_share(
        packed_model(
            tmp_path, "deepseek_v4", n_routed_experts=32, num_experts_per_tok=3,
            mlp_layer_types=kinds,
        ), 0.0,
    )  # fmt: skip
    pool_of(model)
    routers = slots_of(model)._routers
    assert routers is not None
    assert [router is not None for router in routers] == [False, False, True, True]


def test_bad_predictions_are_refused(packed: Path) -> None:
    native = slots_of(with_share(packed, 0.3)).native
    with pytest.raises(ValueError, match="experts of these slots"):
        native.note_likely(0, [EXPERTS], 1)
    with pytest.raises(ValueError, match="experts of these slots"):
        native.script([[-1]])
    with pytest.raises(ValueError, match="one expert or more"):
        native.note_likely(0, [0], 0)
    router = pack_dense(nn.Linear(HIDDEN, 5, bias=False).weight.detach(), None, find_format("int8"))
    for routers, size, why in (
        ([(router.native, [], 3)], HIDDEN, "a scoring function"),
        ([(router.native, [0.0], 0)], HIDDEN, "a bias for each expert"),
        ([(router.native, [], 0)], HIDDEN + 1, "hidden_size columns"),
    ):
        with pytest.raises(ValueError, match=why):
            _native.LookAhead(routers, size)
    with pytest.raises(ValueError, match="routers of these layers"):
        native.run_ahead(_native.LookAhead([(router.native, [], 0)], HIDDEN))


def test_answers_are_those_of_memory(packed: Path, in_memory: Any) -> None:
    model = with_share(packed, 0.3)
    slots_of(model).native.look_always()
    found, expected = (
        tandem.Generator(m).generate([[5, 6, 7]], max_new_tokens=60) for m in (model, in_memory)
    )
    assert found[0].token_ids == expected[0].token_ids
    assert slots_of(model).native.counts().likely > 0
