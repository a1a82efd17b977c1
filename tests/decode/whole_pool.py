"""A pool whose slots are always stepped together, like a batch of prompts."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from tandem.decode.cpu_slots import CpuSlotPool
from tandem.decode.cuda.slots import CudaSlotPool, new_cuda_slot_pool
from tandem.decode.cuda.steps import MakeCapture
from tandem.decode.padded import PaddedBatch
from tandem.decode.slots import num_shared
from tandem.kernels.dense import CpuThreads
from tandem.recording.replay import ReplayedStep


class WholePool:
    """A pool, a prompt for each of its slots, and a token for each slot at every step."""

    def __init__(self, pool: Any, prompts: list[list[int]]) -> None:
        assert pool.num_slots == len(prompts)
        self.pool, self.cache = pool, pool.cache
        self.reused_tokens = [0] * len(prompts)
        self._prompts = prompts

    @property
    def step(self) -> ReplayedStep:
        step: ReplayedStep = self.pool.step
        return step

    @property
    def num_segments(self) -> int:
        """Number of graph segments of a captured step; 0 if the step is not captured."""
        recording: Any = self.step.recording
        return 0 if recording is None else recording.num_segments

    def continue_with(self, prompts: list[list[int]]) -> None:
        """Set new prompts; each slot keeps the prefix that it holds."""
        self._prompts = prompts
        for slot, prompt in enumerate(prompts):
            shared = self.pool.usable(slot, num_shared(self.pool.held(slot), prompt))
            self.pool.keep(slot, shared)
            self.reused_tokens[slot] = shared

    def prefill(self) -> Tensor:
        logits: Tensor = self.pool.prefill(
            {slot: p[len(self.pool.held(slot)) :] for slot, p in enumerate(self._prompts)}
        )
        return logits

    def decode(self, tokens: list[int]) -> Tensor:
        logits: Tensor = self.pool.decode(dict(enumerate(tokens)))
        return logits


def cpu_pool(
    model: Any, threads: CpuThreads, prompts: list[list[int]], **options: Any
) -> WholePool:
    """Return a CPU pool with room for the prompts and a few more tokens."""
    capacity = max(map(len, prompts)) + 8
    pool = CpuSlotPool(model, threads, len(prompts), capacity=capacity, **options)
    return WholePool(pool, prompts)


def cuda_pool(
    model: Any,
    prompts: list[list[int]],
    new_tokens: int,
    *,
    make_capture: MakeCapture | None = None,
) -> WholePool:
    """Return a pool on the CPU twin of a GPU, with room for `new_tokens` more tokens."""
    capacity = max(map(len, prompts)) + new_tokens
    pool = CudaSlotPool(model, len(prompts), capacity=capacity, make_capture=make_capture)
    return WholePool(pool, prompts)


def gpu_pool(
    model: Any, prompts: list[list[int]], new_tokens: int, *, has_replay: bool = True
) -> WholePool:
    """Return a pool on a real GPU, as `Generator` makes it."""
    capacity = max(map(len, prompts)) + new_tokens
    pool = new_cuda_slot_pool(model, len(prompts), capacity=capacity, has_replay=has_replay)
    return WholePool(pool, prompts)


def logits_of(pool: Any, num_sequences: int, tokens: Sequence[int]) -> list[Tensor]:
    """Return the logits of prompts, and of tokens that all sequences get after them."""
    return [pool.prefill().clone(), *(pool.decode([t] * num_sequences).clone() for t in tokens)]


def close(actual: Tensor, expected: Tensor, most: float = 1e-5) -> None:
    """Assert that the relative error of logits is less than `most`."""
    error = (actual.float() - expected.float()).norm() / expected.float().norm()
    assert error < most, float(error)


def require_alike(
    pool: Any, model: Any, prompts: list[list[int]], *, most: float = 1e-5, most_of_steps: float = 0
) -> WholePool:
    """Compare a pool's prompts and replayed steps with Transformers' caches."""
    rows, padded = WholePool(pool, prompts), PaddedBatch(model, prompts, 0)
    close(rows.prefill(), padded.prefill(), most)
    for step in range(6):
        tokens = [60 + step + 10 * slot for slot in range(len(prompts))]
        close(rows.decode(tokens), padded.decode(tokens), most_of_steps or most)
    assert rows.step.is_replaying, rows.step.why_not
    return rows
