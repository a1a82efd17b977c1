"""Tests of latent attention in slots that store latents, against Transformers' caches."""

from typing import Any

import pytest
import torch

from tandem.core.errors import CapacityError
from tandem.decode.cpu_slots import CpuSlotPool
from tandem.hf.packed_layers import PackedLinear
from tandem.kernels.attention import AttentionForm, CachedAttention
from tandem.kernels.dense import CpuThreads, pack_dense
from tandem.kernels.formats.weight_format import find_format
from tandem.kv_cache.latents import kept_keys
from tests.architectures import build_tiny_model
from tests.decode.whole_pool import close, require_alike

pytestmark = pytest.mark.every_isa(first_of="name")

# Complex rotary embeddings, pairs, none with states, factors of queries, an indexer, sinks.
NAMES = ["deepseek_v2", "glm4_moe_lite", "kimi_linear", "mistral4", "glm_moe_dsa", "hy_v4"]
LONG = [32 + i * 7 % 96 for i in range(90)]


def with_packed_latents(model: Any, fmt: str, threads: CpuThreads, *, in_order: bool = True) -> Any:
    """Pack the projections that expand latents, optionally with permuted columns."""
    for module in model.modules():
        if hasattr(module, "expand_kv"):
            weight = module.kv_b_proj.weight
            order = None if in_order else torch.arange(weight.shape[1]).flip(0)
            columns = weight if order is None else weight[:, order]
            packed = pack_dense(columns, None, find_format(fmt))
            module.kv_b_proj = PackedLinear(packed, threads, weight.dtype, order)
    return model


@pytest.mark.parametrize("name", NAMES)
def test_prompts_and_steps_are_transformers_own(name: str, threads: CpuThreads) -> None:
    model: Any = build_tiny_model(name)
    prompts = [[40, 41, 42, 43, 44], [50], LONG[:70]]
    require_alike(CpuSlotPool(model, threads, 3), model, prompts)


@pytest.mark.parametrize(
    ("fmt", "sizes", "in_order"),
    [
        ("bf16", {}, True),
        ("int8-g32", {}, True),
        ("int4-g32", {"qk_nope_head_dim": 24, "v_head_dim": 40, "kv_lora_rank": 40}, True),
        ("int8-g32", {"kv_lora_rank": 64}, False),
    ],
)
def test_packed_projections_are_absorbed(
    fmt: str, sizes: dict[str, int], in_order: bool, threads: CpuThreads
) -> None:
    tiny: Any = build_tiny_model("deepseek_v3", values=sizes)
    model = with_packed_latents(tiny, fmt, threads, in_order=in_order)
    pool = CpuSlotPool(model, threads, 2)
    # In steps queries and attended values are rounded, in prompts latents.
    require_alike(pool, model, [LONG[:33], [50]], most_of_steps=0.02)


def test_a_slot_keeps_latents_alone(threads: CpuThreads) -> None:
    model: Any = build_tiny_model("deepseek_v3")
    pool = CpuSlotPool(model, threads, 1)
    pool.prefill({0: LONG[:64]})
    config = model.config
    rotary, latent = config.qk_rope_head_dim, config.kv_lora_rank
    per_token = (2 * latent + rotary) * 4 * config.num_hidden_layers
    assert pool.cache.filled_bytes == 64 * per_token


@pytest.mark.parametrize("share", [0.25, 0])
@pytest.mark.parametrize("name", ["deepseek_v3", "kimi_linear"])
def test_a_prompt_in_parts_is_the_same_prompt(
    name: str, share: float, threads: CpuThreads, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tandem.kv_cache.latents._SHARE", share)  # of memory for what is expanded
    model: Any = build_tiny_model(name)
    whole, parts = (CpuSlotPool(model, threads, 2) for _ in range(2))
    expected = whole.prefill({1: LONG})
    for first, end in [(0, 1), (1, 2), (2, 50), (50, 90)]:
        logits = parts.prefill({1: LONG[first:end]})
    close(logits, expected)


def test_no_more_is_expanded_than_slots_are_made_for(threads: CpuThreads) -> None:
    pool = CpuSlotPool(build_tiny_model("deepseek_v3"), threads, 1, capacity=1530)
    prompt = [32 + i * 7 % 96 for i in range(1530)]
    for part in (prompt[:1400], prompt[1400:1510], prompt[1510:]):
        pool.prefill({0: part})
        for kept, expanded in pool.cache._expanded._expanded[0].items():
            assert len(part) <= expanded.length <= 16 * expanded.layer.keys.shape[2]
            assert expanded.layer.keys.shape[2] <= kept.keys.shape[2]


def test_slots_go_back_and_begin_with_what_others_hold(threads: CpuThreads) -> None:
    model: Any = build_tiny_model("deepseek_v3")
    pool, fresh = (CpuSlotPool(model, threads, 2) for _ in range(2))
    pool.prefill({0: LONG[:40]})
    for token in LONG[40:43]:
        pool.decode({0: token})
    pool.keep(0, 41)
    close(pool.prefill({0: [90, 91]}), fresh.prefill({0: [*LONG[:41], 90, 91]}))
    pool.copy(0, 1, 30)
    close(pool.prefill({1: [77]}), fresh.prefill({1: [*LONG[:30], 77]}))


def test_what_is_taken_out_is_put_into_another_slot(threads: CpuThreads) -> None:
    model: Any = build_tiny_model("deepseek_v3")
    pool, fresh = (CpuSlotPool(model, threads, 2) for _ in range(2))
    pool.prefill({0: LONG[:64]})
    pool.prefill({1: LONG[9:70]})  # another text, for which the expanded keys are useless
    moving = pool.moving
    assert moving is not None
    data = moving.take_out(0, 0, 48)
    assert data is not None
    pool.keep(1, 0)
    moving.put_in(1, LONG[:48], data)
    close(pool.prefill({1: LONG[48:70]}), fresh.prefill({0: LONG[:70]}))


def test_what_has_no_room_is_expanded_again(
    threads: CpuThreads, monkeypatch: pytest.MonkeyPatch
) -> None:
    model: Any = build_tiny_model("deepseek_v3")
    pool, fresh = (CpuSlotPool(model, threads, 2) for _ in range(2))
    rows = pool.cache._expanded
    pool.prefill({0: LONG[:40]})
    of_one = rows.num_bytes
    monkeypatch.setattr("tandem.experts.store.host_memory.available_bytes", lambda: 1 << 30)
    monkeypatch.setattr("tandem.kv_cache.latents._SHARE", 1.5 * of_one / (1 << 30))
    pool.prefill({1: LONG[:40]})
    assert rows.num_bytes == of_one  # the other slot's
    for slot in (0, 1, 1):
        found = pool.prefill({slot: [77, 78]})
        held = pool.held(slot)
        close(found, fresh.prefill({0: held}))
        fresh.keep(0, 0)
    monkeypatch.setattr("tandem.experts.store.host_memory.available_bytes", lambda: 1)
    with pytest.raises(CapacityError):
        pool.cache.reserve(1000)
    assert rows.num_bytes == 0


def test_several_tokens_of_a_slot_are_verified_in_one_step(threads: CpuThreads) -> None:
    model: Any = build_tiny_model("deepseek_v3")
    one, several = (CpuSlotPool(model, threads, 2) for _ in range(2))
    for pool in (one, several):
        pool.prefill({0: LONG[:20], 1: [50]})
    expected = torch.cat([one.decode({0: token}).clone() for token in (60, 61, 62)])
    for _ in range(4):  # recorded, compared, replayed
        logits = several.verify({0: [60, 61, 62]})
        close(logits, expected)
        several.keep(0, 20)


@pytest.mark.parametrize("kv_dtype", ["fp32", "bf16", "int8"])
@pytest.mark.parametrize("dim", [24, 30, 576])
def test_what_is_kept_is_read_back(kv_dtype: str, dim: int, threads: CpuThreads) -> None:
    form = AttentionForm(num_heads=4, num_kv_heads=1, key_dim=dim, value_dim=dim - 8, scale=1.0)
    layer = CachedAttention(form, kv_dtype)
    layer.reserve(2, 100)
    keys = torch.randn(1, 75, dim, generator=torch.Generator().manual_seed(0))
    slots, positions = torch.ones(75, dtype=torch.int64), torch.arange(75)
    layer.append(threads, slots, positions, keys, keys[..., : dim - 8])
    for first, count in [(0, 75), (0, 1), (16, 50), (64, 11)]:
        found = kept_keys(layer, 1, first, count).float()
        rounding = {"fp32": 0, "bf16": 2**-8, "int8": float(keys.abs().max()) / 127}[kv_dtype]
        expected = keys[0, first : first + count]
        torch.testing.assert_close(found, expected, rtol=rounding, atol=rounding)
