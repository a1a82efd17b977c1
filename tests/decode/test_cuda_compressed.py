"""Tests of DeepSeek-V4 in a GPU's slots on the CPU twin, across all window boundaries."""

import copy
import os
from typing import Any

import pytest
import torch

from tandem.decode.cuda.slots import CudaSlotPool, slot_bytes, why_no_cuda_slots
from tandem.hf.kv_sizes import kv_sizes_of
from tandem.kv_cache.cuda.index_keys import number_of_key
from tests.decode.test_compressed import (
    LONG,
    MIXES,
    SPARSE,
    logits_of,
    model_of,
    model_with,
    take_drafts_back,
    truncate_and_copy,
    wrap_around,
)
from tests.decode.twin_capture import TwinCapture
from tests.decode.whole_pool import close

IS_WHOLE = os.environ.get("TANDEM_DRY_GPU") == "1"
SOME = ["as released", "no multiples"]


def pool_of(mix: str, num_slots: int, **options: Any) -> CudaSlotPool:
    return CudaSlotPool(model_of(mix), num_slots, make_capture=TwinCapture, **options)


@pytest.mark.parametrize("mix", MIXES)
def test_a_prompt_whole_and_in_parts(mix: str) -> None:
    pool, expected = pool_of(mix, 2), logits_of(model_of(mix), LONG)
    close(pool.prefill_with_logits(0, LONG), expected)
    ends = [1, 2, 7, 8, 20, 100, 129, 256, 257, len(LONG)]
    for first, end in zip([0, *ends], ends, strict=False):
        close(pool.prefill_with_logits(1, LONG[first:end]), expected[first:end])


@pytest.mark.parametrize(
    "mix", [pytest.param(m, marks=() if m == "no multiples" else pytest.mark.slow) for m in MIXES]
)
def test_steps_over_every_boundary(mix: str) -> None:
    """Cross the boundaries of windows and ratios, also with the released sizes."""
    pool, end = pool_of(mix, 1), 266 if mix == "as released" else 90
    expected = logits_of(model_of(mix), LONG[:end])
    pool.prefill({0: LONG[:3]})
    for i in range(3, end):
        close(pool.decode({0: LONG[i]}), expected[i : i + 1])
    assert pool.step.is_replaying, pool.step.why_not


@pytest.mark.parametrize("mix", SOME)
def test_slots_of_other_lengths_share_steps(mix: str) -> None:
    model, pool = model_of(mix), pool_of(mix, 3)
    texts = {0: LONG[:200], 1: LONG[40:110], 2: LONG[90:160]}
    expected = {slot: logits_of(model, text) for slot, text in texts.items()}
    lengths = {0: 131, 2: 22}
    for slot, length in lengths.items():
        close(pool.prefill({slot: texts[slot][:length]}), expected[slot][length - 1 : length])
    for step in range(40):
        if step == 13:  # three tokens in steps of four: one row is padding
            close(pool.prefill({1: texts[1][:2]}), expected[1][1:2])
            lengths = {1: 2} | lengths  # in another order, too
        found = pool.decode({slot: texts[slot][n] for slot, n in lengths.items()})
        close(found, torch.stack([expected[slot][n] for slot, n in lengths.items()]))
        lengths = {slot: n + 1 for slot, n in lengths.items()}
    assert pool.step.is_replaying, pool.step.why_not


@pytest.mark.parametrize("mix", [*SOME, "small"])
def test_drafts_are_taken_back_at_every_place_of_a_window(mix: str) -> None:
    take_drafts_back(model_of(mix), pool_of(mix, 2))


@pytest.mark.parametrize("mix", SOME)
def test_a_slot_goes_back_and_another_takes_over(mix: str) -> None:
    truncate_and_copy(model_of(mix), pool_of(mix, 2))


@pytest.mark.skipif(not IS_WHOLE, reason="interpreted for long: make dry-gpu runs it")
@pytest.mark.parametrize("mix", MIXES)
def test_so_they_are_by_the_kernels(mix: str, find_kernels: Any) -> None:
    """The same with the kernels, in steps of one to eight tokens."""
    model = model_with(*MIXES[mix], hc_sinkhorn_iters=2)
    pool = CudaSlotPool(model, 2, make_capture=TwinCapture, find_kernels=find_kernels)
    expected = logits_of(model, LONG)
    at = {0: 1, 1: 45}
    for slot, length in at.items():
        pool.prefill({slot: LONG[:length]})
    for counts in [{0: 1}, {0: 1, 1: 1}, {0: 3}, {0: 3, 1: 5}] * 3:
        steps = {slot: LONG[at[slot] : at[slot] + n] for slot, n in counts.items()}
        found = pool.verify(steps)
        close(found, torch.cat([expected[at[slot] : at[slot] + n] for slot, n in counts.items()]))
        at = {slot: n + counts.get(slot, 0) for slot, n in at.items()}
    assert pool.step.is_replaying


def test_a_few_of_them_by_the_kernels(find_kernels: Any) -> None:
    model = model_with([SPARSE], 5, 2, 6, hc_sinkhorn_iters=2, index_topk=3)  # of four and more
    pool = CudaSlotPool(model, 1, make_capture=TwinCapture, find_kernels=find_kernels)
    expected = logits_of(model, LONG[:23])
    for first, end in ((0, 14), (14, 19)):  # a prompt, and one token after it
        close(pool.prefill_with_logits(0, LONG[first:end]), expected[first:end])
    for i in range(19, 23):
        close(pool.decode({0: LONG[i]}), expected[i : i + 1])
    assert pool.step.is_replaying, pool.step.why_not


def test_no_two_tokens_of_a_step_write_one_key() -> None:
    """Such writes would have no order; only the dummy key, which is not read, may repeat."""
    written = number_of_key(torch.arange(9, 17), 4, 8)
    assert written.tolist() == [7, 7, 2, 7, 7, 7, 3, 7]


def test_a_ring_goes_around(monkeypatch: pytest.MonkeyPatch) -> None:
    wrap_around(model_of("no multiples"), pool_of("no multiples", 2), monkeypatch)


@pytest.mark.parametrize(("kv_dtype", "most"), [("bf16", 1e-2), ("int8", 2e-2)])
def test_keys_in_fewer_bits(kv_dtype: str, most: float) -> None:
    pool = pool_of("as released", 2, kv_dtype=kv_dtype)
    expected = logits_of(model_of("as released"), LONG)
    whole = pool.prefill_with_logits(0, LONG[:150])
    close(whole, expected[:150], most)
    pool.prefill({1: LONG[:70]})
    close(pool.prefill({1: LONG[70:150]}), whole[-1:])  # its own keys are also read as stored
    close(pool.decode({0: LONG[150]}), expected[150:151], most)


@pytest.mark.parametrize("kv_dtype", ["fp32", "bf16", "int8"])
def test_steps_after_invented_tokens(kv_dtype: str) -> None:
    pool = pool_of("small", 2, kv_dtype=kv_dtype)
    pool.prefill({0: LONG[:3]})
    pool.pretend(300, room=4)
    assert pool.decode({0: 60, 1: 61}).isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_model_is_tried_in_slots(dtype: torch.dtype) -> None:
    model = copy.deepcopy(model_of("small")).to(dtype)
    assert why_no_cuda_slots(model) is None


def test_the_memory_of_a_slot_is_what_its_ratios_say() -> None:
    model, pool = model_of("as released"), pool_of("as released", 2)
    pool.prefill({0: LONG[:3]})
    before, cache = pool.cache.kv_bytes, pool.cache
    rings = 4 * 2 * 1024 * 16 * 4  # layers, slots, positions, values of a key, bytes
    assert cache.windows.ring_bytes == rings
    more = 128 * 256
    cache.reserve(256 + more)
    of_token = (2 * (16 + 16) / 4 + 16 / 128) * 4
    assert cache.kv_bytes - before == 2 * more * of_token
    assert cache.windows.ring_bytes == rings
    sizes = kv_sizes_of(model.config, torch.float32, latents=1)
    for num_tokens in (4096, 8192):
        found = slot_bytes(model, LONG[:3], num_tokens)
        assert found is not None
        expected = sizes.device_bytes_of(num_tokens)
        # Rounded for each layer, or with a place for dropped values.
        assert expected * 0.98 <= found - cache.states.step_bytes <= expected * 1.02
