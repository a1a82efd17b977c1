"""A batch of prompts on a GPU: prompts in chunks, decode steps from captured segments.

For the same models as `CachedRows`; whether one is among them is found by trying.
"""

from typing import Any

import torch
from torch import Tensor

from tandem.decode.cached_rows import num_shared
from tandem.decode.cuda.graphs import CudaCapture, GraphedStep
from tandem.decode.cuda.slots import MAX_STEP_TOKENS, CudaSlotPool, MakeCapture
from tandem.decode.kv_cache.cuda import StaticKvCache
from tandem.decode.model_runner import why_not_by_rows


class CudaRows:
    """Rows of one batch, all of which are stepped together."""

    def __init__(
        self,
        model: Any,
        prompts: list[list[int]],
        max_new_tokens: int,
        *,
        make_capture: MakeCapture | None = None,
    ) -> None:
        """Take the prompts as token ids, none empty; nothing is computed yet.

        Options are those of `CudaSlotPool`.
        """
        self._capacity = max(map(len, prompts)) + min(max_new_tokens, MAX_STEP_TOKENS)
        self.pool = CudaSlotPool(
            model, len(prompts), capacity=self._capacity, make_capture=make_capture
        )
        self._prompts = list(prompts)
        self.reused_tokens = [0] * len(prompts)
        """Per row, what the cache held of its prompt."""

    @property
    def num_rows(self) -> int:
        """Rows of the batch."""
        return len(self._prompts)

    @property
    def cache(self) -> StaticKvCache:
        """The rows' keys and values."""
        return self.pool.cache

    @property
    def step(self) -> GraphedStep:
        """The decode step at the present reach."""
        return self.pool.step

    def continue_with(self, prompts: list[list[int]]) -> None:
        """Take other prompts, as many; what a row shares with what it holds stays."""
        assert len(prompts) == len(self._prompts)
        self._prompts = list(prompts)
        for row, prompt in enumerate(prompts):
            self.reused_tokens[row] = num_shared(list(self.pool.held(row)), prompt)
            self.pool.keep(row, self.reused_tokens[row])

    def pretend(self, depth: int) -> None:
        """Let every row hold `depth` random tokens before its prompt, to time what follows."""
        prompts = self._prompts
        self.continue_with([[0]] * len(prompts))
        self.prefill()
        self.pool.pretend(depth, self._capacity)
        self._prompts = [[-1] * depth + prompt for prompt in prompts]

    def prefill(self) -> Tensor:
        """Run the prompts; return the logits of each row's next token: (rows, vocabulary)."""
        pool = self.pool
        return torch.stack(
            [
                pool.prefill(row, prompt[len(pool.held(row)) :])
                for row, prompt in enumerate(self._prompts)
            ]
        )

    def decode(self, tokens: list[int]) -> Tensor:
        """Append one token per row; return the logits of the next: (rows, vocabulary).

        Valid until the next call.
        """
        return self.pool.decode(dict(enumerate(tokens)))


def make_cuda_capture(model: Any) -> MakeCapture:
    """Return what makes captures on a model's GPU, all of them on one stream."""
    stream = torch.cuda.Stream(model.device)
    return lambda: CudaCapture(model.device, stream)


def new_cuda_rows(
    model: Any, prompts: list[list[int]], max_new_tokens: int, *, has_replay: bool
) -> CudaRows:
    """Return rows on the model's GPU, with captured steps unless they are disabled."""
    make_capture = make_cuda_capture(model) if has_replay else None
    return CudaRows(model, prompts, max_new_tokens, make_capture=make_capture)


def new_cuda_slot_pool(model: Any, num_rows: int, *, has_replay: bool) -> CudaSlotPool:
    """Return rows that requests borrow, likewise."""
    make_capture = make_cuda_capture(model) if has_replay else None
    return CudaSlotPool(model, num_rows, make_capture=make_capture)


def try_cuda_rows(model: Any, prompt: list[int]) -> str | None:
    """Step a few tokens both ways; return why `CudaRows` does not serve a model, or None.

    Raises `CapacityError` if the GPU has no memory for as much.
    """
    return why_not_by_rows(model, prompt, lambda prompts: CudaRows(model, prompts, 2))
