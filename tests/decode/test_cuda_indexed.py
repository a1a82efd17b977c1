"""Tests of models with indexers in a GPU's slots, on the CPU twin.

The tiny models select 4 positions, so all but the first tokens skip some.
"""

from typing import Any

import pytest
import torch

from tandem.decode.cuda.slots import CudaSlotPool, why_no_cuda_slots
from tandem.kv_cache.cuda import index_keys
from tandem.kv_cache.index_keys import Selection
from tests.architectures import build_tiny_model
from tests.decode.test_indexed import NAMES, Own, decode_and_compare, filled, tokens_of
from tests.decode.twin_capture import TwinCapture
from tests.decode.whole_pool import close


def filled_twin(model: Any, lengths: list[int]) -> tuple[CudaSlotPool, list[Own]]:
    pool = CudaSlotPool(model, len(lengths), make_capture=TwinCapture)
    return pool, filled(pool, model, lengths)


@pytest.mark.seam
@pytest.mark.parametrize("name", NAMES)
def test_prompts_and_steps_are_transformers_own(name: str) -> None:
    model: Any = build_tiny_model(name)
    assert why_no_cuda_slots(model) is None
    pool, own = filled_twin(model, [3, 1, 20])
    decode_and_compare(pool, dict(enumerate(own)), 6)
    assert pool.step.is_replaying, pool.step.why_not
    decode_and_compare(pool, {1: own[1]}, 2)
    more = tokens_of(9, 12)
    close(pool.prefill({2: more})[0], own[2].next(more))


@pytest.mark.parametrize("name", ["deepseek_v32", "qwen4_exp", "minimax_m3_vl"])
def test_a_cache_that_grows_and_slots_that_follow_others(name: str) -> None:
    model: Any = build_tiny_model(name)
    pool, own = filled_twin(model, [253, 2])
    decode_and_compare(pool, dict(enumerate(own)), 5)  # beyond 256
    before = pool.cache.index_keys.num_bytes
    assert pool.num_bytes > before > 0
    fresh, held = CudaSlotPool(model, 2), list(pool.held(0))
    longer, shorter = pool.usable(0, 252), pool.usable(0, 140)
    assert longer > shorter > 0
    pool.copy(0, 1, longer)
    pool.keep(0, shorter)
    for slot, length in ((0, shorter), (1, longer)):
        fresh.prefill({slot: held[:length]})
    close(pool.decode({0: 50, 1: 60}), fresh.decode({0: 50, 1: 60}))


def test_scores_of_a_prompt_are_never_in_memory_as_a_whole(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model: Any = build_tiny_model("glm_moe_dsa")
    whole, parts = CudaSlotPool(model, 1), CudaSlotPool(model, 1)
    text = tokens_of(1, 60)
    expected = whole.prefill({0: text})
    monkeypatch.setattr(index_keys, "_MOST_SCORES", 1)  # token by token
    close(parts.prefill({0: text}), expected)


def test_of_equal_scores_the_first_positions_are_seen() -> None:
    scores, places = torch.zeros(3, 9), torch.tensor([2, 5, 8])
    scores[2, 7] = float("nan")
    seen = index_keys._seen(scores, places, Selection(1.0, 4), 9)
    assert [row.nonzero().flatten().tolist() for row in seen] == [
        [0, 1, 2], [0, 1, 2, 3], [0, 1, 2, 7]
    ]  # fmt: skip


def test_residual_streams_are_mixed_by_kernels(
    find_kernels: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernels run in steps, which have a dry run before the first token; torch attends."""
    from tandem.triton_kernels.hyper_connections import TritonStreams

    model: Any = build_tiny_model("hy_v4")
    pool, mix_in, calls = (
        CudaSlotPool(model, 1, find_kernels=find_kernels),
        TritonStreams.mix_in,
        [],
    )

    def counted(*args: Any) -> Any:
        calls.append(args)
        return mix_in(*args)

    monkeypatch.setattr(TritonStreams, "mix_in", counted)
    pool.launch_once(1)
    of_step = 2 * model.config.num_hidden_layers + 1  # and before the head
    assert len(calls) == of_step
    own = filled(pool, model, [9])
    assert len(calls) == of_step
    decode_and_compare(pool, dict(enumerate(own)), 1)
    assert len(calls) == 2 * of_step
