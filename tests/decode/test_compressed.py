"""Tests of DeepSeek-V4 in slots: windows and compressed keys agree with Transformers."""

import math
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig

from tandem.decode.cpu_slots import CpuSlotPool, why_no_cpu_slots
from tandem.forecast.state_bytes import state_bytes_of
from tandem.hf.kv_sizes import kv_sizes_of
from tandem.kernels.dense import CpuThreads
from tests.architectures import build_tiny_model
from tests.decode.whole_pool import close

pytestmark = pytest.mark.every_isa(first_of="mix")

SLIDING, SPARSE, HEAVY = (
    "sliding_attention",
    "compressed_sparse_attention",
    "heavily_compressed_attention",
)
# Layers, tokens of a window, and tokens per key of sparse and of heavily compressed layers.
MIXES: dict[str, tuple[list[str], int, int, int]] = {
    "sliding": ([SLIDING] * 2, 8, 4, 128),
    "sparse": ([SPARSE] * 2, 8, 4, 128),
    "heavy": ([HEAVY] * 2, 8, 4, 16),
    "as released": ([SLIDING, SPARSE, HEAVY, SPARSE], 128, 4, 128),
    "small": ([HEAVY, SPARSE, SLIDING, HEAVY], 5, 2, 6),
    "no multiples": ([SPARSE, HEAVY, SPARSE, SLIDING], 7, 3, 10),
}
LONG = [32 + (i * 7 + i * i) % 96 for i in range(320)]


@cache
def model_of(mix: str) -> Any:
    return model_with(*MIXES[mix])


def model_with(kinds: list[str], window: int, sparse: int, heavy: int, **more: float) -> Any:
    values: dict[str, Any] = {
        "layer_types": kinds,
        "num_hidden_layers": len(kinds),
        "mlp_layer_types": ["hash_moe"] + ["moe"] * (len(kinds) - 1),
        "sliding_window": window,
        "compress_rates": {SPARSE: sparse, HEAVY: heavy},
        "max_position_embeddings": 4096,
        "partial_rotary_factor": 0.5,
        "index_topk": 9,
        **more,
    }
    model: Any = build_tiny_model("deepseek_v4", values=values)
    assert model.config.layer_types == kinds
    return model


def logits_of(model: Any, tokens: list[int]) -> Tensor:
    """Return the logits of Transformers' own code, computed at once: (n_tokens, vocabulary)."""
    with torch.inference_mode():
        logits: Tensor = model(torch.tensor([tokens]), use_cache=False).logits[0]
    return logits


@pytest.mark.parametrize("mix", MIXES)
def test_a_prompt_whole_and_in_parts(mix: str, threads: CpuThreads) -> None:
    model, pool = model_of(mix), CpuSlotPool(model_of(mix), threads, 2)
    expected = logits_of(model, LONG)
    close(pool.prefill_with_logits(0, LONG), expected)
    ends = [1, 2, 7, 8, 20, 100, 129, 256, 257, len(LONG)]
    for first, end in zip([0, *ends], ends, strict=False):
        close(pool.prefill_with_logits(1, LONG[first:end]), expected[first:end])


@pytest.mark.parametrize("mix", MIXES)
def test_steps_over_every_boundary(mix: str, threads: CpuThreads) -> None:
    model, pool = model_of(mix), CpuSlotPool(model_of(mix), threads, 1)
    expected = logits_of(model, LONG)
    pool.prefill({0: LONG[:3]})
    for i in range(3, len(LONG)):
        close(pool.decode({0: LONG[i]}), expected[i : i + 1])
    assert pool.step.is_replaying, pool.step.why_not


@pytest.mark.parametrize("mix", ["as released", "no multiples"])
def test_slots_of_other_lengths_share_steps(mix: str, threads: CpuThreads) -> None:
    model, pool = model_of(mix), CpuSlotPool(model_of(mix), threads, 3)
    texts = {0: LONG[:200], 1: LONG[40:110], 2: LONG[90:160]}
    expected = {slot: logits_of(model, text) for slot, text in texts.items()}
    lengths = {0: 131, 2: 22}

    def begin(slots: dict[int, int]) -> None:
        found = pool.prefill({slot: texts[slot][:n] for slot, n in slots.items()})
        close(found, torch.stack([expected[slot][n - 1] for slot, n in slots.items()]))

    begin(lengths)
    for step in range(40):
        if step == 13:
            begin({1: 2})
            lengths = {1: 2} | lengths  # in another order, too
        found = pool.decode({slot: texts[slot][n] for slot, n in lengths.items()})
        close(found, torch.stack([expected[slot][n] for slot, n in lengths.items()]))
        lengths = {slot: n + 1 for slot, n in lengths.items()}


def take_drafts_back(model: Any, pool: Any) -> None:
    """Repeatedly draft five tokens in both slots of a pool and keep one to four of them."""
    expected = logits_of(model, LONG)
    pool.prefill({0: LONG[:100]})
    pool.prefill({1: LONG[:3]})
    at, kept = {0: 100, 1: 3}, 1
    while at[0] < 180:
        steps = {slot: [*LONG[n : n + kept], *[50] * (5 - kept)] for slot, n in at.items()}
        logits = pool.verify(steps)  # on a GPU ten rows, and six padding rows
        for i, (slot, n) in enumerate(at.items()):
            close(logits[5 * i : 5 * i + kept], expected[n : n + kept])
            pool.keep(slot, n + kept)
            at[slot] = n + kept
        kept = kept % 4 + 1
    assert pool.step.is_replaying, pool.step.why_not
    close(pool.prefill({0: LONG[at[0] : 300]}), expected[299:300])


def truncate_and_copy(model: Any, pool: Any) -> None:
    """Copy a prefix to another slot and continue it; truncate the first slot and continue that."""
    pool.prefill({0: LONG[:200]})
    pool.decode({0: 60})
    assert [pool.usable(0, n) for n in (201, 200, 191, 71)] == [201, 192, 72, 0]
    pool.copy(0, 1, 192)
    other = [*LONG[:192], 50, 51, 52]
    close(pool.prefill({1: other[192:]}), logits_of(model, other)[-1:])
    pool.keep(0, 72)
    other = [*LONG[:72], *LONG[9:90]]
    close(pool.prefill_with_logits(0, other[72:]), logits_of(model, other)[72:])
    close(pool.decode({0: 40}), logits_of(model, [*other, 40])[-1:])
    pool.keep(0, 0)  # nothing of the old contents is read
    close(pool.prefill({0: LONG[50:90]}), logits_of(model, LONG[50:90])[-1:])


def wrap_around(model: Any, pool: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fill a slot past its ring's size; it can be truncated only while the ring has the window."""
    monkeypatch.setattr("tandem.hf.kv_sizes.MARGIN_TOKENS", 80)
    monkeypatch.setattr("tandem.hf.kv_sizes.GRANULE_TOKENS", 64)  # 128 positions are kept
    expected = logits_of(model, LONG)
    pool.prefill({0: LONG[:150]})
    close(pool.prefill_with_logits(0, LONG[150:290]), expected[150:290])
    assert [pool.usable(0, n) for n in (290, 289, 281)] == [290, 282, 0]  # one is there at 162
    pool.copy(0, 1, 282)
    for i in range(290, 310):
        close(pool.decode({0: LONG[i]}), expected[i : i + 1])
    close(pool.prefill({1: LONG[282:]}), expected[-1:])
    pool.keep(1, 0)
    close(pool.prefill({1: LONG[:200]}), expected[199:200])
    assert pool.usable(1, 195) == 192


def test_a_ring_goes_around(monkeypatch: pytest.MonkeyPatch, threads: CpuThreads) -> None:
    model = model_of("no multiples")
    wrap_around(model, CpuSlotPool(model, threads, 2), monkeypatch)


@pytest.mark.parametrize("mix", ["as released", "small", "no multiples"])
def test_drafts_are_taken_back_at_every_place_of_a_window(mix: str, threads: CpuThreads) -> None:
    take_drafts_back(model_of(mix), CpuSlotPool(model_of(mix), threads, 2))


@pytest.mark.parametrize("mix", ["as released", "no multiples"])
def test_a_slot_goes_back_and_another_takes_over(mix: str, threads: CpuThreads) -> None:
    truncate_and_copy(model_of(mix), CpuSlotPool(model_of(mix), threads, 2))


@pytest.mark.every_isa(first_of="kv_dtype")
@pytest.mark.parametrize("kv_dtype", ["int8", "fp32", "bf16"])
def test_what_is_kept_moves_to_another_slot(kv_dtype: str, threads: CpuThreads) -> None:
    model = model_of("as released")
    first, second = (CpuSlotPool(model, threads, 2, kv_dtype=kv_dtype) for _ in range(2))
    second.prefill({1: [40]})
    first.cache.states.keep_every(256)
    first.prefill({1: LONG[:300]})
    first.decode({1: 60})
    source, target = first.moving, second.moving
    assert source is not None
    assert target is not None
    assert target.cut(0, 0)
    second.prefill({0: LONG[200:290]})  # keys of other tokens, where these are expected
    second.keep(0, 0)
    assert target.cut(0, 0)
    data, states = source.take_out(1, 0, 256), source.states.take_out(1, 256)
    assert data is not None
    assert states is not None
    target.put_in(0, LONG[:256], memoryview(bytearray(data)))
    target.states.put_in(0, 256, memoryview(bytearray(states)))
    first.keep(1, 256)
    for pool, slot in ((first, 1), (second, 0)):
        pool.prefill({slot: LONG[256:260]})
    ours, theirs = first.decode({1: 70}).clone(), second.decode({0: 70}).clone()
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize("kv_dtype", ["fp32", "bf16", "int8"])
def test_steps_after_invented_tokens(kv_dtype: str, threads: CpuThreads) -> None:
    pool = CpuSlotPool(model_of("as released"), threads, 2, kv_dtype=kv_dtype)
    pool.prefill({0: LONG[:3]})
    pool.pretend(300, room=4)
    assert pool.decode({0: 60, 1: 61}).isfinite().all()


def test_what_is_selected_counts_as_read(threads: CpuThreads) -> None:
    pools = [CpuSlotPool(model_with([kind], 8, 4, 128), threads, 1) for kind in (SPARSE, HEAVY)]
    read = []
    for pool in pools:
        pool.prefill({0: LONG[:9]})
        for depth in (40, 256, 512):
            pool.pretend(depth, room=4)
            read.append(pool.cache.filled_bytes)
    key = 16 * 4  # bytes, of an index key too
    window = 16 * key  # in whole blocks
    assert read[:3] == [window + 10 * key + n * key for n in (10, 64, 128)]
    assert read[3:] == [window + n * key for n in (1, 2, 4)]


def test_a_model_is_tried_without_padding(threads: CpuThreads) -> None:
    """Transformers' own code would count padding as part of a prompt's first windows."""
    assert why_no_cpu_slots(model_of("small"), threads) is None


@pytest.mark.parametrize("mix", MIXES)
def test_sizes_from_a_config_are_those_of_the_memory(mix: str, threads: CpuThreads) -> None:
    model, (_, _, sparse, heavy) = model_of(mix), MIXES[mix]
    num_tokens = math.lcm(sparse, heavy, 256)  # whole windows
    pool = CpuSlotPool(model, threads, 2, capacity=num_tokens)
    pool.prefill({0: LONG[:3]})
    cache = pool.cache
    sizes = kv_sizes_of(model.config, torch.float32)
    parts = sizes.layers
    other_bytes = num_tokens * sum(num_bytes for kind, num_bytes in parts if kind != SLIDING)
    kept = cache.compressed.num_bytes + cache.index_keys.num_bytes
    assert (
        other_bytes * 0.97 <= kept / 2 <= other_bytes
    )  # each layer's bytes of a token are rounded up
    assert state_bytes_of(model) == cache.states.step_bytes
    windows = [num_bytes for kind, num_bytes in parts if kind == SLIDING]
    assert windows == [16 * 4] * len(MIXES[mix][0])
    if mix != "sliding":  # the layer does not know that its keys are values
        whole = (cache.num_bytes - cache.states.num_bytes) / 2
        assert whole <= sizes.bytes_of(num_tokens) <= 1.03 * whole


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_long_slot_takes_what_the_ratios_say(dtype: torch.dtype, threads: CpuThreads) -> None:
    """The growth with the length is the ratios' keys and states; windows add a constant."""
    sizes = {"head_dim": 512, "index_head_dim": 128, "partial_rotary_factor": 64 / 512}
    model, last = model_with([SPARSE, HEAVY], 128, 4, 128, **sizes).to(dtype), 128 * 1024
    pools = [CpuSlotPool(model, threads, 1, capacity=n) for n in (last, 256)]
    for pool in pools:
        pool.prefill({0: LONG[:3]})
    whole, cache = (pool.cache for pool in pools)

    def of_ratios(num_tokens: int) -> int:
        unfinished = 8 * 2 * 2 * 512 + 8 * 2 * 2 * 128 + 128 * 2 * 512  # values and gates, in fp32
        keys = num_tokens // 4 * (512 + 128) + num_tokens // 128 * 512
        return keys * dtype.itemsize + unfinished * 4

    windows = 2 * 128 * 512 * dtype.itemsize
    assert whole.num_bytes <= 1.05 * (of_ratios(last) + windows)
    for num_tokens in [*range(last - 20_000, last, 199), last]:
        cache.reserve(num_tokens)  # as a slot grows
        kept = cache.compressed.num_bytes + cache.index_keys.num_bytes + cache.states.num_bytes
        assert kept <= 1.05 * of_ratios(num_tokens)


def test_a_token_of_the_released_model_takes_what_its_ratios_say() -> None:
    config: Any = AutoConfig.for_model("deepseek_v4")
    parts = kv_sizes_of(config, torch.bfloat16).layers
    num_bytes = {kind: {n for of, n in parts if of == kind} for kind, _ in parts}
    key, index_key = 512 * 2, 128 * 2
    assert num_bytes == {SLIDING: {key}, SPARSE: {(key + index_key) // 4}, HEAVY: {key // 128}}
    assert sum(kind == SLIDING for kind, _ in parts) == 43
