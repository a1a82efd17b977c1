"""Tests of models with states beside keys and values in slots, against Transformers' caches."""

import inspect
import logging
from typing import Any

import pytest
import torch
from transformers.utils.logging import warning_once

from tandem.decode.cpu_slots import CpuSlotPool, why_no_cpu_slots
from tandem.decode.substitutions import FUNCTIONS
from tandem.decode.substitutions.shallow_copy import with_functions
from tandem.kernels.dense import CpuThreads
from tests.architectures import build_tiny_model
from tests.decode.whole_pool import WholePool, close, cpu_pool, require_alike

pytestmark = pytest.mark.every_isa(first_of="name")

# One of each family of operations, and commonly used models.
NAMES = ["qwen3_5_moe", "qwen3_next", "kimi_linear", "nemotron_h", "jamba", "lfm2_moe", "qwen4_exp"]
LONG = [32 + i * 7 % 96 for i in range(200)]


@pytest.mark.seam
@pytest.mark.parametrize("name", [*NAMES, "granitemoehybrid"])
def test_prompts_and_steps_of_any_lengths_are_the_models(name: str, threads: CpuThreads) -> None:
    model: Any = build_tiny_model(name)
    prompts = [[40, 41, 42, 43, 44], [50], LONG[:70]]
    require_alike(CpuSlotPool(model, threads, 3), model, prompts)


def test_ngrams_begin_after_an_end_of_text(threads: CpuThreads) -> None:
    model: Any = build_tiny_model("qwen4_exp")
    end = model.config.eos_token_id
    prompts = [[40, end, 41, 42, end, end, 43, 44, 45, end], [end], [50, end, 51]]
    require_alike(CpuSlotPool(model, threads, 3), model, prompts)


@pytest.mark.parametrize("name", [*NAMES, "deepseek_v4"])
def test_a_prompt_in_parts_is_the_same_prompt(name: str, threads: CpuThreads) -> None:
    model: Any = build_tiny_model(name)
    whole, parts = (CpuSlotPool(model, threads, 2) for _ in range(2))
    expected = whole.prefill({1: LONG})
    for first, end in [(0, 1), (1, 2), (2, 100), (100, 200)]:
        logits = parts.prefill({1: LONG[first:end]})
    close(logits, expected)


def test_reference_warnings_are_heard_only_where_the_reference_runs(
    threads: CpuThreads, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    model: Any = build_tiny_model("qwen3_5_moe")
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    for fails in (False, True):
        warning_once.cache_clear()
        if fails:
            tolerances = {torch.float32: -1.0}
            monkeypatch.setattr("tandem.decode.trial._TOLERANCES", tolerances)
        with caplog.at_level(logging.WARNING, logger="transformers"):
            assert (why_no_cpu_slots(model, threads) is not None) == fails
        assert any("falling back" in record.message for record in caplog.records) == fails


def test_requests_join_and_leave(threads: CpuThreads) -> None:
    model: Any = build_tiny_model("qwen3_5_moe")
    alone, shared = (CpuSlotPool(model, threads, 3) for _ in range(2))
    alone.prefill({0: [40, 41, 42]})
    expected = [alone.decode({0: 60 + i}).clone() for i in range(8)]
    shared.prefill({1: [40, 41, 42]})
    for i in range(8):
        if i == 2:
            shared.prefill({0: [90, 91]})
        others = {0: 100 + i} if 2 <= i < 6 else {}
        close(shared.decode({**others, 1: 60 + i})[-1:], expected[i])


def continued(pool: CpuSlotPool, slot: int, length: int, tokens: list[int]) -> torch.Tensor:
    pool.keep(slot, length)
    return pool.prefill({slot: tokens})


@pytest.mark.parametrize("name", [*NAMES, "deepseek_v4"])
def test_a_slot_goes_back_to_a_checkpoint(name: str, threads: CpuThreads) -> None:
    model: Any = build_tiny_model(name)
    pool, fresh = (CpuSlotPool(model, threads, 2) for _ in range(2))
    pool.prefill({0: LONG[:120]})
    pool.prefill({0: LONG[120:]})
    for i in range(3):
        pool.decode({0: 60 + i})
    assert [pool.usable(0, n) for n in (203, 202, 192, 191, 112, 111)] == [
        203,
        192,
        192,
        112,
        112,
        0,
    ]
    other = [33, 34, 35]
    close(continued(pool, 0, 112, other), fresh.prefill({0: LONG[:112] + other}))
    assert pool.held(0) == LONG[:112] + other
    # and begins again with zeros
    assert pool.usable(0, 50) == 0
    close(continued(pool, 0, 0, LONG[:9]), fresh.prefill({1: LONG[:9]}))


@pytest.mark.parametrize("length", [112, 123])
def test_another_slot_takes_over_a_beginning(length: int, threads: CpuThreads) -> None:
    model: Any = build_tiny_model("qwen3_5_moe")
    pool, fresh = (CpuSlotPool(model, threads, 2) for _ in range(2))
    pool.prefill({0: LONG[:120]})
    for token in LONG[120:123]:
        pool.decode({0: token})
    assert pool.usable(0, length) == length
    pool.copy(0, 1, length)
    close(pool.prefill({1: [90, 91]}), fresh.prefill({0: [*LONG[:length], 90, 91]}))
    # the slot that was copied is unchanged
    close(pool.decode({0: 77}), fresh.prefill({1: [*LONG[:123], 77]}))


def test_a_step_that_breaks_off_goes_back_to_a_checkpoint(
    monkeypatch: pytest.MonkeyPatch, threads: CpuThreads
) -> None:
    model: Any = build_tiny_model("qwen3_5_moe")
    pool = CpuSlotPool(model, threads, 2)
    expected = pool.prefill({0: [40, 41], 1: [50]})
    with monkeypatch.context() as patch:
        patch.setattr(pool.cache, "attend", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            pool.prefill({1: [51, 52]})
    assert pool.held(1) == []
    assert pool.held(0) == [40, 41]
    close(pool.prefill({1: [50]}), expected[1:])
    pool.keep(0, 0)
    expected = pool.prefill({0: LONG[:120]})
    monkeypatch.setattr(pool.cache, "commit", lambda: 1 / 0)  # the states are at a later token
    with pytest.raises(ZeroDivisionError):
        pool.decode({0: 60})
    monkeypatch.undo()
    assert pool.held(0) == LONG[:112]
    close(pool.prefill({0: LONG[112:120]}), expected)


def test_recordings_that_differ_leave_the_models_states(
    monkeypatch: pytest.MonkeyPatch, threads: CpuThreads
) -> None:
    model: Any = build_tiny_model("qwen3_5_moe")
    prompts = [[40, 41, 42]]
    own = cpu_pool(model, threads, prompts, has_replay=False)
    expected = [own.prefill(), *(own.decode([60 + i]).clone() for i in range(4))]
    broken = cpu_pool(model, threads, prompts)
    logits = [broken.prefill()]
    monkeypatch.setattr("tandem.decode.cpu_slots._TOLERANCES", {torch.float32: 0.0})
    logits += [broken.decode([60 + i]).clone() for i in range(4)]
    assert broken.step.why_not == "its recording gives other logits"
    for actual, wanted in zip(logits, expected, strict=True):
        close(actual, wanted)


def test_memory_counts_states_and_checkpoints_stay_within_their_budget(
    monkeypatch: pytest.MonkeyPatch, threads: CpuThreads
) -> None:
    model: Any = build_tiny_model("qwen3_5_moe")
    pool = CpuSlotPool(model, threads, 1)
    pool.prefill({0: [40]})
    one = pool.cache.states.step_bytes
    assert pool.num_bytes > one > 0
    monkeypatch.setattr("tandem.kv_cache.states._MOST_BYTES", 2 * one)
    pool = CpuSlotPool(model, threads, 1)
    pool.prefill({0: [40]})
    without = pool.cache.states.num_bytes
    pool.keep(0, 0)
    for first in range(0, 200, 100):
        pool.prefill({0: LONG[first : first + 100]})
    assert pool.usable(0, 199) == 192
    assert pool.usable(0, 100) == 92
    pool.prefill({0: LONG[:100]})
    assert pool.cache.states.num_bytes <= without + 2 * one
    assert pool.usable(0, 299) == 292  # the newest is kept


@pytest.mark.parametrize("name", [*NAMES, "deepseek_v4"])
def test_checkpoints_inside_a_prompt_do_not_change_its_bits(
    name: str, threads: CpuThreads, monkeypatch: pytest.MonkeyPatch
) -> None:
    model: Any = build_tiny_model(name)
    cut, uncut = (CpuSlotPool(model, threads, 2) for _ in range(2))
    logits = cut.prefill_with_logits(0, LONG)
    assert [cut.usable(0, n) for n in (200, 199, 191, 71)] == [200, 192, 72, 0]
    monkeypatch.setattr("tandem.kv_cache.states.cut_lengths", lambda *_: [])
    expected = uncut.prefill_with_logits(0, LONG)
    assert uncut.usable(0, 199) == 0
    assert torch.equal(logits, expected)
    assert torch.equal(cut.decode({0: 60}), uncut.decode({0: 60}))
    # also from a checkpoint inside it, apart from torch's products of other batch sizes
    close(continued(cut, 0, 72, LONG[72:]), expected[-1:])


def test_forwards_are_the_classes_own_elsewhere() -> None:
    model: Any = build_tiny_model("qwen3_5_moe")
    kind = type(model.model.layers[0].linear_attn)
    ours = with_functions(kind.forward)
    assert ours is not None
    assert ours is with_functions(kind.forward)
    assert with_functions(type(model.lm_head).forward) is None
    names = inspect.unwrap(kind.forward).__globals__.keys()
    assert names >= FUNCTIONS.keys() & {"causal_conv1d_fn"}
    # without a state of Tandem's the model's own forward runs
    hidden = torch.randn(1, 5, 64)
    layer = model.model.layers[0].linear_attn
    with torch.no_grad():
        assert torch.equal(ours(layer, hidden), layer(hidden))


def test_a_conversation_is_not_computed_again(threads: CpuThreads) -> None:
    model: Any = build_tiny_model("qwen3_5_moe")
    pool: WholePool = cpu_pool(model, threads, [LONG[:100]])
    pool.prefill()
    for token in (60, 61, 62):
        pool.decode([token])
    pool.continue_with([[*LONG[:100], 60, 61, 62, 90, 91]])  # the next turn
    assert pool.reused_tokens == [103]
    pool.prefill()
    pool.continue_with([[*LONG[:98], 90, 91]])  # the first one, edited at its end
    assert pool.reused_tokens == [92]
