"""Tests of attention with a distance bias (Inkling and Inkling 2), within and beyond its extent."""

from typing import Any

import pytest
import torch
from torch import Tensor

from tandem.decode.cpu_slots import CpuSlotPool
from tandem.decode.cuda.slots import CudaSlotPool
from tandem.decode.padded import PaddedBatch
from tandem.kernels.dense import CpuThreads
from tests.architectures import build_tiny_model
from tests.decode.twin_capture import TwinCapture
from tests.decode.whole_pool import close

every_isa = pytest.mark.every_isa(first_of="model")
# Shorter than the prompts, so that some positions have no bias; scores grow from the 6th token on.
VALUES = {"rel_extent": 20, "log_scaling_n_floor": 5}
PROMPTS = [[40 + 7 * i % 80 for i in range(70)], [50], [60, 61, 62]]
NAMES = ["inkling", "inkling2_loop"]


@pytest.fixture(scope="module", params=NAMES)
def model(request: pytest.FixtureRequest) -> Any:
    return build_tiny_model(request.param, values=VALUES)


@pytest.fixture(params=["cpu", "cuda"])
def pool(model: Any, threads: CpuThreads, request: pytest.FixtureRequest) -> Any:
    """A pool of a device; for CUDA torch computes on the CPU, captured by the twin."""
    if request.param == "cpu":
        return CpuSlotPool(model, threads, 4)
    return CudaSlotPool(model, 4, make_capture=TwinCapture)


def alone(model: Any, prompt: list[int], continuation: list[int]) -> Tensor:
    """Return Transformers' logits of a prompt and of each token after it."""
    batch = PaddedBatch(model, [prompt], 0)
    return torch.stack([batch.prefill()[0], *(batch.decode([token])[0] for token in continuation)])


@every_isa
def test_prompts_in_chunks_and_replayed_steps(model: Any, pool: Any) -> None:
    pool.prefill({0: PROMPTS[0][:1]})
    pool.prefill({0: PROMPTS[0][1:66]})
    found = [pool.prefill({0: PROMPTS[0][66:], 1: PROMPTS[1], 2: PROMPTS[2]}).clone()]
    steps = [[35 + 11 * i % 90, 40 + i, 90 - i] for i in range(8)]
    found += [pool.decode(dict(enumerate(tokens))).clone() for tokens in steps]
    assert pool.step.is_replaying, pool.step.why_not
    for slot, prompt in enumerate(PROMPTS):
        ours = torch.stack([logits[slot] for logits in found])
        close(ours, alone(model, prompt, [tokens[slot] for tokens in steps]))


def test_steps_by_the_kernels_of_a_gpu(find_kernels: Any) -> None:
    """Slots of different lengths, one beyond the extent, in Triton's interpreter."""
    model: Any = build_tiny_model("inkling", values={**VALUES, "rel_extent": 5})
    pool = CudaSlotPool(model, 2, find_kernels=find_kernels)
    prompts, steps = [PROMPTS[0][:7], PROMPTS[1]], [[90, 40], [91, 41]]
    found = [pool.prefill(dict(enumerate(prompts))).clone()]
    found += [pool.decode(dict(enumerate(tokens))).clone() for tokens in steps]
    for slot, prompt in enumerate(prompts):
        ours = torch.stack([logits[slot] for logits in found])
        close(ours, alone(model, prompt, [tokens[slot] for tokens in steps]))


@every_isa
def test_a_slot_goes_back_and_on_and_lends_its_beginning(model: Any, pool: Any) -> None:
    prompt = [40 + 11 * i % 80 for i in range(120)]
    pool.prefill({0: prompt})
    pool.verify({0: [90, 91, 50, 51]})
    pool.keep(0, 122)
    expected = alone(model, prompt, [90, 91, 92])
    close(pool.decode({0: 92})[0], expected[-1])
    shared = pool.usable(0, 115)
    assert shared == 112  # a checkpoint's
    pool.copy(0, 3, shared)
    again = [*prompt[:115], 100, 101]
    close(pool.prefill({3: again[shared:]})[0], alone(model, again, [])[0])
