"""Tests of windows that keep prompts (Unlimited-OCR): only decoded tokens slide out."""

from typing import Any

import pytest
import torch
from torch import Tensor

from tandem.decode.cpu_slots import CpuSlotPool
from tandem.decode.cuda.slots import CudaSlotPool
from tandem.decode.padded import PaddedBatch
from tandem.kernels.dense import CpuThreads
from tests.architectures import build_tiny_model
from tests.decode.whole_pool import close

every_isa = pytest.mark.every_isa(first_of="device")
WINDOW = 4
PROMPT = [40 + 7 * i % 80 for i in range(70)]  # more than a chunk of positions
CONTINUATION = [35 + 11 * i % 90 for i in range(20)]


@pytest.fixture(scope="module")
def model() -> Any:
    return build_tiny_model("unlimited_ocr")


@pytest.fixture(params=["cpu", "cuda"])
def device(request: pytest.FixtureRequest) -> Any:
    return request.param


def pool_of(model: Any, threads: CpuThreads, device: str) -> Any:
    """Return the slots of a device; for CUDA torch computes on the CPU."""
    return CpuSlotPool(model, threads, 3) if device == "cpu" else CudaSlotPool(model, 3)


def alone(model: Any, prompt: list[int], continuation: list[int]) -> list[Tensor]:
    """Return Transformers' logits of a prompt and of each token after it."""
    batch = PaddedBatch(model, [prompt], 0)
    return [batch.prefill()[0], *(batch.decode([token])[0] for token in continuation)]


def decoded(pool: Any, slot: int, continuation: list[int]) -> list[Tensor]:
    return [pool.decode({slot: token})[0].clone() for token in continuation]


@every_isa
def test_prompts_in_chunks_stay_and_decoded_tokens_slide(
    model: Any, threads: CpuThreads, device: str
) -> None:
    pool = pool_of(model, threads, device)
    pool.prefill({0: PROMPT[:1]})
    pool.prefill({0: PROMPT[1:66]})
    found = [pool.prefill({0: PROMPT[66:]})[0].clone(), *decoded(pool, 0, CONTINUATION)]
    close(torch.stack(found), torch.stack(alone(model, PROMPT, CONTINUATION)))


def test_steps_by_the_kernels_of_a_gpu(model: Any, find_kernels: Any) -> None:
    """Two of the decoded tokens slide out, in Triton's interpreter."""
    pool = CudaSlotPool(model, 1, find_kernels=find_kernels)
    found = [pool.prefill({0: PROMPT[:3]})[0].clone(), *decoded(pool, 0, CONTINUATION[:6])]
    close(torch.stack(found), torch.stack(alone(model, PROMPT[:3], CONTINUATION[:6])))


@every_isa
def test_a_slot_goes_back_and_on(model: Any, threads: CpuThreads, device: str) -> None:
    """Drafts are taken back after tokens have slid out; a copied slot keeps its prompt."""
    pool = pool_of(model, threads, device)
    pool.prefill({0: PROMPT[:9]})
    decoded(pool, 0, CONTINUATION[:10])
    pool.verify({0: [*CONTINUATION[10:12], 50, 51]})
    pool.keep(0, 9 + 12)
    pool.copy(0, 2, 9 + 12)
    expected = alone(model, PROMPT[:9], CONTINUATION)[13:]
    for slot in (0, 2):
        close(torch.stack(decoded(pool, slot, CONTINUATION[12:])), torch.stack(expected))


@every_isa
def test_a_prompt_goes_on_from_what_saw_all_before_it(
    model: Any, threads: CpuThreads, device: str
) -> None:
    pool = pool_of(model, threads, device)
    pool.prefill({0: PROMPT})
    decoded(pool, 0, CONTINUATION)
    held = [*PROMPT, *CONTINUATION]
    assert [pool.usable(0, n) for n in (90, 75, 74, 60)] == [74, 74, 74, 60]
    pool.copy(0, 1, 74)
    close(pool.prefill({1: [*held[74:], 60]})[0], alone(model, [*held, 60], [])[0])
    pool.keep(0, 60)
    close(pool.prefill({0: [50, 51]})[0], alone(model, [*held[:60], 50, 51], [])[0])
    expected = alone(model, [*held, 60], CONTINUATION)[1:]
    close(torch.stack(decoded(pool, 1, CONTINUATION)), torch.stack(expected))


@every_isa
def test_what_a_window_has_left_is_not_moved(model: Any, threads: CpuThreads) -> None:
    """Disk segments belong to prompts, whose tokens attended to everything before them."""
    pool = CpuSlotPool(model, threads, 2)
    pool.prefill({0: PROMPT[:30]})
    decoded(pool, 0, CONTINUATION)
    moving = pool.moving
    assert moving is not None
    assert moving.take_out(0, 32, 16) is None
    data = moving.take_out(0, 16, 16)
    first = moving.take_out(0, 0, 16)
    assert data is not None
    assert first is not None
    held = [*PROMPT[:30], *CONTINUATION]
    moving.put_in(1, held[:16], first)
    moving.put_in(1, held[16:32], data)
    close(pool.prefill({1: held[32:]})[0], alone(model, held, [])[0])
