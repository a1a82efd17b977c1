"""Tests of prompts with images in sequence slots, against Transformers' `generate`."""

from typing import Any

import pytest
import torch

from tandem.core.errors import UnsupportedModelError
from tandem.decode.cpu_slots import CpuSlotPool
from tandem.decode.images import ImagePrompt, require_images
from tandem.decode.padded import PaddedSlotPool
from tandem.decode.slots import num_shared
from tandem.kernels.dense import CpuThreads
from tests.architectures import build_tiny_model
from tests.conftest import two_threads
from tests.decode.whole_pool import close
from tests.images import MODELS, build_image_model, image_prompt, transformers_tokens

pytestmark = pytest.mark.seam

TWO_IMAGES: list[int | tuple[int, int]] = [40, 41, 22, (2, 3), 23, 42, 22, (4, 2), 23, 43, 44]


@pytest.fixture(scope="module")
def threads() -> CpuThreads:
    return two_threads()


@pytest.fixture(scope="module", params=MODELS)
def model(request: pytest.FixtureRequest) -> Any:
    return build_image_model(request.param)


@pytest.fixture(scope="module")
def one_model() -> Any:
    return build_image_model("qwen3_5_moe")


def read(pool: CpuSlotPool, slot: int, prompt: ImagePrompt, first: int = 0) -> torch.Tensor:
    pool.show(slot, prompt)
    return pool.prefill({slot: prompt.keys[first:]})


def tokens_after(pool: Any, slot: int, logits: torch.Tensor, count: int) -> list[int]:
    tokens = []
    for _ in range(count):
        tokens.append(int(logits[0].argmax()))
        logits = pool.decode({slot: tokens[-1]})
    return tokens


def test_tokens_are_those_of_generate(model: Any, threads: CpuThreads) -> None:
    prompt = image_prompt(model, TWO_IMAGES)
    expected = transformers_tokens(model, prompt, 8)
    pool = CpuSlotPool(model, threads, 2)
    assert tokens_after(pool, 1, read(pool, 1, prompt), 8) == expected
    assert pool.step.is_replaying, pool.step.why_not
    padded = PaddedSlotPool(model, 1, 0)
    padded.show(0, prompt)
    assert tokens_after(padded, 0, padded.prefill({0: prompt.keys}), 8) == expected


def test_a_prompt_may_be_cut_inside_an_image(model: Any, threads: CpuThreads) -> None:
    prompt = image_prompt(model, TWO_IMAGES)
    pool = CpuSlotPool(model, threads, 2)
    expected = read(pool, 0, prompt)
    pool.show(1, prompt)
    ends = [1, 5, 6, 14, len(prompt.keys)]
    for first, end in zip([0, *ends], ends, strict=False):
        logits = pool.prefill({1: prompt.keys[first:end]})
    close(logits, expected)
    steps = [pool.decode({0: 60 + i, 1: 60 + i}) for i in range(3)]
    for step in steps:
        close(step[1], step[0])


def test_prompts_with_and_without_images_run_together(model: Any, threads: CpuThreads) -> None:
    images = [image_prompt(model, TWO_IMAGES), image_prompt(model, [50, (2, 2), 51], [7])]
    alone, together = (CpuSlotPool(model, threads, 3) for _ in range(2))
    expected = [
        read(alone, 0, images[0]), alone.prefill({1: [70, 71, 72]}), read(alone, 2, images[1])
    ]  # fmt: skip
    together.show(0, images[0])
    together.show(2, images[1])
    logits = together.prefill({0: images[0].keys, 1: [70, 71, 72], 2: images[1].keys})
    close(logits, torch.cat(expected))
    step = together.decode({0: 60, 1: 61, 2: 62})
    close(step, torch.cat([alone.decode({slot: 60 + slot}).clone() for slot in range(3)]))


def test_other_images_are_another_beginning(one_model: Any, threads: CpuThreads) -> None:
    first, other = (image_prompt(one_model, TWO_IMAGES, seeds) for seeds in ([0, 1], [0, 9]))
    assert first.ids == other.ids
    pool = CpuSlotPool(one_model, threads, 1)
    read(pool, 0, first)
    assert num_shared(pool.held(0), first.keys) == len(first.keys) - 1
    assert num_shared(pool.held(0), other.keys) == 12


def test_a_conversation_goes_on_after_its_images(one_model: Any, threads: CpuThreads) -> None:
    turns: list[int | tuple[int, int]] = [50, 51, 22, (2, 2), 23, 52]
    before, whole = (image_prompt(one_model, [*TWO_IMAGES, *more]) for more in ([], turns))
    pool, fresh = (CpuSlotPool(one_model, threads, 2) for _ in range(2))
    expected = read(fresh, 0, whole)
    logits = read(pool, 0, before)
    shared = num_shared(pool.held(0), whole.keys)
    assert shared == len(before.keys)
    close(read(pool, 0, whole, shared), expected)
    close(pool.decode({0: 60}), fresh.decode({0: 60}))
    # and without images: a slot's later positions equal its token indices again
    pool.keep(0, 0)
    pool.show(0, None)
    pool.prefill({0: [70, 71]})
    logits = pool.decode({0: 72})
    close(logits, fresh.prefill({1: [70, 71, 72]}))


def test_images_that_were_read_are_not_looked_at_again(
    one_model: Any, threads: CpuThreads, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, whole = (image_prompt(one_model, [*TWO_IMAGES, *more]) for more in ([], [50, 51]))
    pool = CpuSlotPool(one_model, threads, 1)
    read(pool, 0, before)
    monkeypatch.setattr(one_model.model.visual, "forward", lambda *_, **__: 1 / 0)
    read(pool, 0, whole, len(before.keys))
    pool.keep(0, 0)
    with pytest.raises(ZeroDivisionError):
        read(pool, 0, whole)


def test_a_model_without_a_tower_says_so() -> None:
    with pytest.raises(UnsupportedModelError, match="Qwen3MoeForCausalLM takes no images"):
        require_images(build_tiny_model("qwen3_moe"))
