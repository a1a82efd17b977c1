"""Tests that experts of layers routed by token are read before their layers begin."""

from pathlib import Path
from typing import Any

import pytest
import torch

import tandem
from tandem.decode.cpu_slots import CpuSlotPool
from tandem.decode.cuda.slots import CudaSlotPool
from tandem.decode.token_routed import TokenRouted
from tests.disk.loading import packed_model, slots_of, with_share
from tests.inside import runtime_in

EXPERTS, TOP_K, HASHED = 32, 3, 2
KINDS = ["hash_moe"] * HASHED + ["moe"] * 2


@pytest.fixture(scope="module")
def hashed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny packed DeepSeek-V4."""
    return packed_model(
        tmp_path_factory.mktemp("hashed"), "deepseek_v4", n_routed_experts=EXPERTS,
        num_experts_per_tok=TOP_K, mlp_layer_types=KINDS,
    )  # fmt: skip


def tables_of(model: Any) -> list[torch.Tensor]:
    return [model.model.layers[layer].mlp.gate.tid2eid for layer in range(HASHED)]


@pytest.mark.parametrize("share", [0.0, 0.3])
def test_what_tokens_need_is_read_before_it_is_requested(hashed: Path, share: float) -> None:
    model = with_share(hashed, share)
    native = slots_of(model).native
    tokens = [40, 41]
    expected = [set(table[tokens].flatten().tolist()) for table in tables_of(model)]
    TokenRouted(model).expect(tokens, None)
    assert native.counts().read_bytes > 0
    assert native.counts().misses == 0
    with torch.inference_mode():
        logits = model(torch.tensor([tokens])).logits
        assert torch.equal(logits, tandem.load(hashed)(torch.tensor([tokens])).logits)
    # All of the first layer: there are enough transit slots.
    assert native.counts().hits >= len(expected[0])


def test_steps_have_the_tokens_of_memory_and_miss_nothing_that_is_known(hashed: Path) -> None:
    model, whole = with_share(hashed, 0.0), tandem.load(hashed)
    pools = [CpuSlotPool(one, runtime_in(one).threads, 1) for one in (model, whole)]
    native = slots_of(model).native
    for pool in pools:
        pool.prefill({0: [50, 51, 52]})
        while not pool.step.is_replaying:  # until then a step runs twice
            pool.decode({0: 53})
    for token in range(60, 75):
        before = native.counts()
        found, expected = (pool.decode({0: token}) for pool in pools)
        assert torch.equal(found, expected)
        counts = native.counts()
        # By token: all are present or being read. Two layers of a token use six of the slots.
        assert counts.misses - before.misses <= (len(KINDS) - HASHED) * TOP_K
        assert counts.hits - before.hits >= HASHED * TOP_K


def test_steps_on_a_gpu_miss_nothing_that_is_known(hashed: Path) -> None:
    model = with_share(hashed, 0.0)
    pool, native = CudaSlotPool(model, 1), slots_of(model).native
    pool.prefill({0: [50, 51, 52]})
    for token in range(60, 65):
        before = native.counts().misses
        pool.decode({0: token})
        assert native.counts().misses - before <= (len(KINDS) - HASHED) * TOP_K


def test_what_was_expected_in_vain_takes_no_room(hashed: Path) -> None:
    """A step that was cancelled leaves more than half of its slots to the next one."""
    model, whole = with_share(hashed, 0.0), tandem.load(hashed)
    ahead = TokenRouted(model)
    with torch.inference_mode():
        for first in range(40, 80, 10):
            ahead.expect(list(range(first, first + 10)), None)
            prompt = torch.arange(first + 5, first + 45)[None]
            assert torch.equal(model(prompt).logits, whole(prompt).logits)


def test_models_in_memory_and_of_other_routers_expect_nothing(hashed: Path, packed: Path) -> None:
    TokenRouted(tandem.load(hashed)).expect([40], None)
    other = with_share(packed, 0.3)
    before = slots_of(other).statistics().read_bytes
    TokenRouted(other).expect([40], None)
    assert TokenRouted(other)._tables == []
    assert slots_of(other).statistics().read_bytes >= before


def test_experts_that_are_not_there_are_refused(hashed: Path) -> None:
    native = slots_of(with_share(hashed, 0.3)).native
    with pytest.raises(ValueError, match="experts of these slots"):
        native.expect([[EXPERTS]])
    with pytest.raises(ValueError, match="experts of these slots"):
        native.expect([[], [], [], [], [0]])
