"""Tests of models with states in a GPU's slots, against Transformers' caches, on the CPU twin."""

from typing import Any

import pytest
import torch

from tandem.core.errors import CapacityError
from tandem.decode.cuda.attention import state_kernels
from tandem.decode.cuda.slots import CudaSlotPool, why_no_cuda_slots
from tests.architectures import architectures, build_tiny_model
from tests.decode.test_states import LONG
from tests.decode.twin_capture import TwinCapture
from tests.decode.whole_pool import close, require_alike

# The gated delta rule, Kimi's, both Mambas, convolutions alone, lightning attention, ZAYA's.
_WITH_STATES = [
    "qwen3_5_moe", "qwen3_next", "kimi_linear", "nemotron_h", "granitemoehybrid", "jamba",
    "lfm2_moe", "bailing_hybrid", "minimax", "zaya",
]  # fmt: skip
NAMES = [name for name in _WITH_STATES if name in architectures()]
PROMPTS = [[40, 41, 42, 43, 44], [50], LONG[:20]]


@pytest.mark.seam
@pytest.mark.parametrize("name", NAMES)
def test_prompts_and_steps_are_the_models(name: str) -> None:
    model: Any = build_tiny_model(name)
    require_alike(CudaSlotPool(model, 3, make_capture=TwinCapture), model, PROMPTS)
    assert why_no_cuda_slots(model) is None


@pytest.mark.parametrize("name", ["qwen3_5_moe", "lfm2_moe"])
def test_so_they_are_by_the_kernels(
    name: str, find_kernels: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Most models attend with torch here; the attention kernels have their own tests."""
    if name == "qwen3_5_moe":
        values = {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}
        model: Any = build_tiny_model(name, values=values)
        pool = CudaSlotPool(model, 1, make_capture=TwinCapture, find_kernels=find_kernels)
        require_alike(pool, model, [[40, 41, 42]])
        return
    model = build_tiny_model(name)
    states = state_kernels(find_kernels(model.device))
    monkeypatch.setattr("tandem.decode.cuda.slots.state_kernels", lambda kernels: states)
    pool = CudaSlotPool(model, 2, make_capture=TwinCapture)
    require_alike(pool, model, [[40, 41], [50]])


@pytest.mark.parametrize("name", ["qwen3_5_moe", "nemotron_h", "lfm2_moe"])
def test_a_slot_goes_back_to_a_checkpoint(name: str) -> None:
    model: Any = build_tiny_model(name)
    pool, fresh = (CudaSlotPool(model, 2, make_capture=TwinCapture) for _ in range(2))
    for part in (LONG[:120], LONG[120:]):  # a prompt in parts
        logits = pool.prefill({0: part})
    close(logits, fresh.prefill({1: LONG}))
    for i in range(3):
        pool.decode({0: 60 + i})
    found = [pool.usable(0, n) for n in (203, 202, 192, 191, 112, 111)]
    assert found == [203, 192, 192, 112, 112, 0]
    pool.copy(0, 1, 192)
    pool.keep(0, 112)
    expected = fresh.prefill({0: [*LONG[:112], 33, 34]})
    close(pool.prefill({0: [33, 34]}), expected)
    close(pool.decode({0: 77}), fresh.decode({0: 77}))
    fresh.keep(0, 0)
    close(pool.prefill({1: [33]}), fresh.prefill({0: [*LONG[:192], 33]}))
    pool.copy(1, 0, 193)  # the present states, without a checkpoint
    close(pool.decode({0: 77}), fresh.decode({0: 77}))
    pool.keep(0, 0)  # and begins again with zeros
    fresh.keep(0, 0)
    close(pool.prefill({0: LONG[:9]}), fresh.prefill({0: LONG[:9]}))


def test_a_step_that_breaks_off_goes_back_to_a_checkpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    model: Any = build_tiny_model("qwen3_5_moe")
    pool = CudaSlotPool(model, 2)
    expected = pool.prefill({0: LONG[:120]})
    with monkeypatch.context() as patch:
        patch.setattr(pool.cache, "commit", lambda: 1 / 0)  # the states are at a later token
        with pytest.raises(ZeroDivisionError):
            pool.decode({0: 60})
    assert pool.held(0) == LONG[:112]
    close(pool.prefill({0: LONG[112:120]}), expected)


def test_a_step_without_memory_is_repeated_from_where_it_began(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model: Any = build_tiny_model("qwen3_5_moe")
    pool, fresh = CudaSlotPool(model, 1, make_capture=TwinCapture), CudaSlotPool(model, 1)
    for one in (pool, fresh):
        one.prefill({0: LONG[:120]})
    commit, room = pool._model.logits, [1]

    def scarce(*args: Any, **options: Any) -> torch.Tensor:
        result: torch.Tensor = commit(*args, **options)
        if room:
            room.pop()
            raise torch.OutOfMemoryError("made up")
        return result

    for part in (pool, pool._steps):
        monkeypatch.setattr(part, "_make_room", lambda: True)
    monkeypatch.setattr(pool._model, "logits", scarce)
    close(pool.prefill({0: [33, 34]}), fresh.prefill({0: [33, 34]}))
    room.append(1)
    while not pool.step.is_replaying:
        close(pool.decode({0: 60}), fresh.decode({0: 60}))
    # A replayed step cannot be repeated: the request is lost, the slot goes back.
    monkeypatch.setattr(pool.step.recording, "run", lambda: scarce_run())

    def scarce_run() -> torch.Tensor:
        raise torch.OutOfMemoryError("made up")

    with pytest.raises(CapacityError, match="no memory left"):
        pool.decode({0: 60})
    assert pool.held(0) == LONG[:112]


def test_memory_counts_states_and_their_checkpoints() -> None:
    model: Any = build_tiny_model("qwen3_5_moe")
    pool = CudaSlotPool(model, 2)
    pool.prefill({0: LONG[:5]})
    states = pool.cache.states
    logs = sum(layer.memory.log.nbytes for layer in states._layers.values())
    assert states.num_bytes == 2 * states.step_bytes + logs > logs > 0
    assert pool.num_bytes == pool.cache.kv_bytes + states.num_bytes
    pool.keep(0, 0)
    pool.prefill({0: LONG})
    assert states.num_bytes == 4 * states.step_bytes + logs  # at 192 and 72 tokens


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype: torch.dtype) -> None:
    model: Any = build_tiny_model("qwen3_5_moe").to(dtype)
    assert why_no_cuda_slots(model) is None
