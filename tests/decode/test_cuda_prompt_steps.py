"""Tests of prompts that are captured as steps, on the twin, with interpreted kernels."""

from pathlib import Path
from typing import Any

import pytest

import tandem
from tandem.decode.cuda import steps
from tandem.decode.cuda.slots import CudaSlotPool
from tandem.experts.tracing.events import LayerExecuted
from tests.decode.twin_capture import TwinCapture
from tests.decode.whole_pool import close
from tests.hf.tiny import save_tiny_checkpoint
from tests.inside import runtime_in

pytest.importorskip("triton")
# During a twin's capture, the experts' results are arbitrary memory.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


def pools(model: Any, find_kernels: Any, num_slots: int = 1) -> tuple[CudaSlotPool, CudaSlotPool]:
    """Return slots whose prompts are captured, and others whose prompts are not."""
    captured = CudaSlotPool(model, num_slots, make_capture=TwinCapture, find_kernels=find_kernels)
    return captured, CudaSlotPool(model, num_slots, find_kernels=find_kernels)


@pytest.fixture(autouse=True)
def short_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let prompts of 5 to 8 tokens be captured: interpreted kernels are slow."""
    monkeypatch.setattr(steps, "_LEAST_PROMPT_TOKENS", 5)


def text(length: int, first: int = 40) -> list[int]:
    return [first + place * 7 % 60 for place in range(length)]


def captured_sizes(pool: CudaSlotPool) -> set[int]:
    found = pool._steps.by_size.items()
    return {key[0] for key, step in found if key[1] and step.replayed.is_replaying}


@pytest.fixture(scope="module", params=["qwen3_moe", "gpt_oss"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    path = tmp_path_factory.mktemp("models") / request.param
    return tandem.load(save_tiny_checkpoint(path, request.param), dtype="float32")


def test_prompts_of_any_length_after_any_text_give_the_models_logits(
    model: Any, find_kernels: Any
) -> None:
    ours, theirs = pools(model, find_kernels, 2)
    events: list[LayerExecuted] = []
    for number, length in enumerate([5, 8, 6, 8, 5, 7]):
        slot = number % 2
        prompt = {slot: text(length, 40 + number)}
        runtime_in(model).executor.listeners.append(events.append)
        found = ours.prefill(prompt)
        runtime_in(model).executor.listeners.clear()
        close(found, theirs.prefill(prompt), 2e-4)
        assert ours.held(slot) == theirs.held(slot)
        assert ours.cache.prompt_lengths == theirs.cache.prompt_lengths
        each = {0: 50, 1: 51} if number else {0: 50}
        close(ours.decode(each), theirs.decode(each), 2e-4)
    assert captured_sizes(ours) == {8}
    assert len(events) == 6 * len(runtime_in(model).store)  # each prompt is reported once
    ours.keep(0, 11)
    theirs.keep(0, 11)
    close(ours.prefill({0: text(7)}), theirs.prefill({0: text(7)}), 2e-4)


def test_the_first_prompts_long_ones_and_scored_ones_are_the_models_own(
    model: Any, find_kernels: Any
) -> None:
    ours, theirs = pools(model, find_kernels)
    for length in (6, 600, 4, 6):
        close(ours.prefill({0: text(length)}), theirs.prefill({0: text(length)}), 2e-4)
    assert not any(of_prompt for _, of_prompt, *_ in ours._steps.by_size)
    for _ in range(2):
        close(ours.prefill_with_logits(0, text(6)), theirs.prefill_with_logits(0, text(6)), 2e-4)
    assert not any(of_prompt for _, of_prompt, *_ in ours._steps.by_size)


def test_captured_prompts_are_the_first_to_make_room(model: Any, find_kernels: Any) -> None:
    ours, theirs = pools(model, find_kernels)
    for _ in range(6):
        for pool in (ours, theirs):
            pool.keep(0, 0)
        close(ours.prefill({0: text(6)}), theirs.prefill({0: text(6)}), 2e-4)
    assert captured_sizes(ours) == {8}
    assert ours._make_room()
    assert captured_sizes(ours) == set()
    assert not ours._make_room()  # the CPU's executor has no cache to shrink
    for pool in (ours, theirs):
        pool.keep(0, 0)
    close(ours.prefill({0: text(6)}), theirs.prefill({0: text(6)}), 2e-4)
    assert captured_sizes(ours) == set()


@pytest.mark.parametrize("name", ["deepseek_v2", "qwen3_5_moe"])
def test_latents_and_states_have_no_prompt_steps(
    tmp_path: Path, find_kernels: Any, name: str
) -> None:
    model = tandem.load(save_tiny_checkpoint(tmp_path / name, name), dtype="float32")
    pool, _ = pools(model, find_kernels)
    for _ in range(4):
        pool.keep(0, 0)
        pool.prefill({0: text(6)})
    assert not pool.cache.takes_prompt_steps
    assert captured_sizes(pool) == set()


def test_a_prompt_step_that_cannot_be_captured_is_the_models_own(
    model: Any, find_kernels: Any
) -> None:
    class Broken(TwinCapture):
        def begin(self) -> None:
            raise RuntimeError("no captures today")

    ours = CudaSlotPool(model, 1, make_capture=Broken, find_kernels=find_kernels)
    theirs = CudaSlotPool(model, 1, find_kernels=find_kernels)
    for _ in range(5):
        for pool in (ours, theirs):
            pool.keep(0, 0)
        close(ours.prefill({0: text(6)}), theirs.prefill({0: text(6)}), 2e-4)
    assert captured_sizes(ours) == set()
    assert ours.cache.lengths == [6]
