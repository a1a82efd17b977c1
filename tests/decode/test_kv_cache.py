"""Tests of the KV cache under a model: accuracy of int8, and errors that name sizes."""

from typing import Any

import pytest
import torch

from tandem.core.errors import CapacityError
from tandem.decode.cpu_slots import CpuSlotPool
from tandem.decode.padded import PaddedBatch
from tandem.hf.kv_sizes import ring_size
from tandem.kernels.attention import BLOCK_TOKENS
from tandem.kernels.dense import CpuThreads
from tests.architectures import build_tiny_model
from tests.decode.whole_pool import cpu_pool

pytestmark = pytest.mark.every_isa(first_of="name")


def test_int8_keys_and_values_write_nearly_the_same(threads: CpuThreads) -> None:
    model: Any = build_tiny_model("qwen3_moe")
    logits, sizes = [], []
    for kv_dtype in ("auto", "int8"):
        slots = cpu_pool(model, threads, [[40, 41, 42], [60] * 90], kv_dtype=kv_dtype)
        steps = [slots.prefill(), *(slots.decode([50 + i, 60 + i]).clone() for i in range(8))]
        logits.append(torch.stack(steps))
        sizes.append(slots.cache.num_bytes)
        assert slots.step.is_replaying
    error = (logits[1] - logits[0]).norm() / logits[0].norm()
    assert 0 < error < 0.02
    assert sizes[1] < 0.4 * sizes[0]  # fp32 before


def test_a_kv_cache_larger_than_memory_is_refused_with_its_size(
    monkeypatch: pytest.MonkeyPatch, threads: CpuThreads
) -> None:
    model: Any = build_tiny_model("qwen3_moe")
    slots = cpu_pool(model, threads, [[40, 41]] * 2)
    slots.prefill()
    per_token = slots.cache.num_bytes / 2 / 256
    monkeypatch.setattr("tandem.experts.store.host_memory.available_bytes", lambda: 1 << 20)
    with pytest.raises(CapacityError, match=r"2 slots of \d+ tokens takes .* 1 MiB .*='int8'"):
        cpu_pool(model, threads, [[40] * int((1 << 20) / per_token)] * 2).prefill()
    before = slots.decode([50, 51]).clone()
    with pytest.raises(CapacityError):
        slots.cache.pretend(int((2 << 20) / per_token))
    slots.cache.truncate(0, 2)  # it continues with the present capacity
    slots.cache.truncate(1, 2)
    torch.testing.assert_close(slots.decode([50, 51]), before)


def test_layers_that_exist_have_their_memory(
    monkeypatch: pytest.MonkeyPatch, threads: CpuThreads
) -> None:
    """Sliding and full layers come one after another, and each kind is checked at its first."""
    model: Any = build_tiny_model("gpt_oss")
    slots = cpu_pool(model, threads, [[40, 41]])
    slots.prefill()
    room = slots.cache.num_bytes * 105 // 100
    slots = cpu_pool(model, threads, [[40, 41]])
    monkeypatch.setattr(
        "tandem.experts.store.host_memory.available_bytes", lambda: room - slots.cache.num_bytes
    )
    slots.prefill()


@pytest.fixture
def small_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the rings small, so that they wrap around after some dozens of tokens."""
    monkeypatch.setattr("tandem.hf.kv_sizes.MARGIN_TOKENS", 16)
    monkeypatch.setattr("tandem.hf.kv_sizes.GRANULE_TOKENS", 64)


def tokens_of(seed: int, count: int) -> list[int]:
    return torch.randint(32, 128, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.mark.parametrize("name", ["gpt_oss", "gemma4", "dots3_note"])  # the last has latents
@pytest.mark.usefixtures("small_windows")
def test_windows_keep_what_they_reach_and_change_nothing(name: str, threads: CpuThreads) -> None:
    model: Any = build_tiny_model(name)
    prompts = [tokens_of(1, 90), tokens_of(2, 5)]
    ours, theirs = cpu_pool(model, threads, prompts), PaddedBatch(model, prompts, 0)
    logits, expected = ours.prefill(), theirs.prefill()
    for i in range(140):
        torch.testing.assert_close(logits, expected, rtol=1e-3, atol=1e-3)
        tokens = [32 + (7 * i + row) % 90 for row in range(2)]
        logits, expected = ours.decode(tokens).clone(), theirs.decode(tokens)
        rings = [(x, first) for x, first in ours.cache.layers_of(0) if x.form.kept_window]
        assert {x.keys.shape[2] * BLOCK_TOKENS for x, _ in rings} == {ring_size(4)}
    assert ours.step.is_replaying
    assert all(first >= 128 for _, first in rings)


@pytest.mark.usefixtures("small_windows")
def test_rows_go_on_from_what_their_windows_still_reach(threads: CpuThreads) -> None:
    model: Any = build_tiny_model("gpt_oss")
    prompt = tokens_of(3, 40)
    slots = cpu_pool(model, threads, [prompt])
    slots.prefill()
    decoded = tokens_of(4, 150)
    for token in decoded:
        slots.decode([token])
    held = prompt + decoded
    for shared, reused in ((len(held) - 10, len(held) - 10), (60, 0)):
        again = held[:shared] + tokens_of(5, 12)
        slots.continue_with([again])
        assert slots.reused_tokens == [reused]
        logits = [slots.prefill(), *(slots.decode([50 + i]).clone() for i in range(3))]
        fresh = cpu_pool(model, threads, [again])
        expected = [fresh.prefill(), *(fresh.decode([50 + i]).clone() for i in range(3))]
        torch.testing.assert_close(torch.stack(logits), torch.stack(expected), rtol=1e-3, atol=1e-3)


@pytest.mark.usefixtures("small_windows")
def test_borrowed_rows_copy_what_windows_keep(threads: CpuThreads) -> None:
    model: Any = build_tiny_model("gpt_oss")
    pool, tokens = CpuSlotPool(model, threads, 3), tokens_of(6, 200)
    for first in range(0, 200, 25):
        pool.prefill({0: tokens[first : first + 25]})
    assert pool.usable(0, 30) == 0
    assert pool.usable(0, 190) == 190
    pool.copy(0, 2, 190)
    alone = CpuSlotPool(model, threads, 1)
    alone.prefill({0: tokens[:190]})
    for i in range(8):
        got, expected = pool.decode({0: 40, 2: 50 + i}), alone.decode({0: 50 + i})
        torch.testing.assert_close(got[1], expected[0], rtol=1e-3, atol=1e-3)
    pool.keep(2, 0)
    torch.testing.assert_close(
        pool.prefill({2: tokens[:50]}), CpuSlotPool(model, threads, 1).prefill({0: tokens[:50]}),
        rtol=1e-3, atol=1e-3,
    )  # fmt: skip
