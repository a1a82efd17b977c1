"""Tests of models with indexers in slots, against Transformers.

The tiny models select 4 positions, so all but the first steps skip some.
"""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

from tandem.decode.cpu_slots import CpuSlotPool, why_no_cpu_slots
from tandem.hf.compat import cache_argument
from tandem.hf.kv_sizes import kv_sizes_of
from tandem.kernels.dense import CpuThreads
from tandem.kv_cache.indexers import IndexScores, UnknownIndexerError
from tests.architectures import architectures, build_tiny_model
from tests.decode.whole_pool import close

pytestmark = pytest.mark.every_isa(first_of="name")


# By positions, two by blocks, and by blocks for each head; tests/generate compares all.
_KINDS = ["deepseek_v32", "qwen4_exp", "glm5_next", "minimax_m3_vl"]
NAMES = [name for name in _KINDS if name in architectures()]


class Own:
    """One sequence in a cache of Transformers."""

    def __init__(self, model: Any) -> None:
        self.model, self.argument = model, cache_argument(model)
        self.cache = DynamicCache(config=model.config.get_text_config(decoder=True))

    @torch.no_grad()
    def next(self, tokens: list[int]) -> Tensor:
        """Return the logits after more tokens, (vocabulary,)."""
        outputs = self.model(torch.tensor([tokens]), use_cache=True, **{self.argument: self.cache})
        logits: Tensor = outputs.logits[0, -1]
        return logits


def tokens_of(seed: int, count: int) -> list[int]:
    return torch.randint(32, 128, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def decode_and_compare(pool: Any, own: dict[int, Own], count: int) -> None:
    for i in range(count):
        tokens = {slot: 32 + (7 * i + 13 * slot) % 90 for slot in own}
        logits = pool.decode(tokens)
        for row, (slot, token) in enumerate(tokens.items()):
            close(logits[row], own[slot].next([token]))


def filled(pool: Any, model: Any, lengths: list[int]) -> list[Own]:
    """Fill slots with prompts of these lengths, and compare each with Transformers."""
    prompts = {slot: tokens_of(slot, length) for slot, length in enumerate(lengths)}
    logits = pool.prefill(prompts)
    own = [Own(model) for _ in lengths]
    for slot, prompt in prompts.items():
        close(logits[slot], own[slot].next(prompt))
    return own


def filled_on_cpu(
    model: Any, threads: CpuThreads, lengths: list[int]
) -> tuple[CpuSlotPool, list[Own]]:
    pool = CpuSlotPool(model, threads, len(lengths))
    return pool, filled(pool, model, lengths)


@pytest.mark.seam
@pytest.mark.parametrize("name", NAMES)
def test_prompts_and_replayed_steps_are_transformers_own(name: str, threads: CpuThreads) -> None:
    model: Any = build_tiny_model(name)
    assert why_no_cpu_slots(model, threads) is None
    pool, own = filled_on_cpu(model, threads, [7, 2, 23])
    decode_and_compare(pool, dict(enumerate(own)), 6)
    assert pool.step.why_not is None
    assert pool.step.is_replaying
    decode_and_compare(pool, {2: own[2], 0: own[0]}, 5)
    assert pool.step.is_replaying
    more = tokens_of(9, 12)
    close(pool.prefill({1: more})[0], own[1].next(more))
    decode_and_compare(pool, dict(enumerate(own)), 2)


@pytest.mark.parametrize("name", NAMES)
def test_slots_go_back_and_begin_with_what_others_hold(name: str, threads: CpuThreads) -> None:
    model: Any = build_tiny_model(name)
    pool, own = filled_on_cpu(model, threads, [91, 3, 5])
    decode_and_compare(pool, {0: own[0]}, 2)
    held = list(pool.held(0))
    pool.copy(0, 1, pool.usable(0, 87))
    pool.keep(0, pool.usable(0, 85))
    for slot, most in ((0, 85), (1, 87)):
        assert most - 5 < len(pool.held(slot)) <= most  # at a checkpoint, where there are states
        prompt = held[: len(pool.held(slot))] + tokens_of(10 + slot, 6)
        own[slot] = Own(model)
        logits = pool.prefill({slot: prompt[len(pool.held(slot)) :]})[0]
        close(logits, own[slot].next(prompt))
    decode_and_compare(pool, dict(enumerate(own)), 3)


@pytest.mark.parametrize("name", ["deepseek_v32", "qwen4_exp", "minimax_m3_vl"])
def test_index_keys_grow_with_the_slots(name: str, threads: CpuThreads) -> None:
    model: Any = build_tiny_model(name)
    pool, own = filled_on_cpu(model, threads, [250, 6])
    before, keys_before = pool.num_bytes, pool.cache.index_keys.num_bytes
    decode_and_compare(pool, dict(enumerate(own)), 10)  # over 256 tokens
    assert pool.num_bytes > before
    assert pool.cache.index_keys.num_bytes == 2 * keys_before


def test_sizes_from_a_config_have_the_index_keys(threads: CpuThreads) -> None:
    model: Any = build_tiny_model("minimax_m3_vl")
    pool = CpuSlotPool(model, threads, 1, capacity=512)
    pool.prefill({0: [40, 41]})
    assert kv_sizes_of(model.config, torch.float32).bytes_of(512) == pool.cache.num_bytes


# Released models have layers that reuse the previous layer's selection; Mistral's may also use
# the keys of an earlier one.
SHARING: dict[str, dict[str, Any]] = {
    "glm_moe_dsa": {"indexer_types": ["full", "shared", "full", "shared"]},
    "mistral_large4": {
        "indexer_types": ["full", "shared", "full", "full"],
        "kv_source_layers": [0, 0, 0, 3],
    },
}


def sharing_model(name: str) -> Any:
    model: Any = build_tiny_model(name)
    config = copy.deepcopy(model.config)
    for key, value in SHARING[name].items():
        setattr(config.get_text_config(decoder=True), key, value)
    shared = type(model)(config).train(False)
    shared.load_state_dict(model.state_dict(), strict=False)
    return shared


@pytest.mark.seam
@pytest.mark.parametrize("name", sorted(SHARING.keys() & set(architectures())))
def test_layers_share_what_was_selected_and_keys(name: str, threads: CpuThreads) -> None:
    model = sharing_model(name)
    assert why_no_cpu_slots(model, threads) is None
    pool, own = filled_on_cpu(model, threads, [7, 2, 23])
    decode_and_compare(pool, dict(enumerate(own)), 6)
    assert pool.step.is_replaying


def test_an_indexer_of_another_kind_is_refused(threads: CpuThreads) -> None:
    """A trial of six tokens would not detect it: all of up to 2048 positions are selected."""
    scores: Any = IndexScores(lambda *args: torch.zeros(0), torch.zeros(1, 3, 8))
    query = torch.zeros(1, 3, 2, 8)
    with pytest.raises(UnknownIndexerError, match="calls softmax"):
        torch.softmax(torch.matmul(query, scores.transpose(-1, -2)), -1)
    with pytest.raises(UnknownIndexerError, match="arranges"):
        scores.transpose(0, 1)
    with pytest.raises(UnknownIndexerError, match="may be negative"):
        torch.matmul(query, torch.matmul(query, scores))
    with pytest.raises(UnknownIndexerError, match="selects by something else"):
        torch.matmul(query, scores).topk(4)
