"""Steps rows of any position through a model as one sequence, on Tandem's KV cache.

For models whose attention goes through Transformers' attention functions and whose layers keep
nothing but keys and values. Whether that holds is found by trying: `try_rows`.
"""

from typing import Any

import torch
from torch import Tensor

from tandem.core.errors import ExecutionError
from tandem.decode.kv_cache.cpu import KvCache
from tandem.decode.model_runner import ModelRunner, why_not_by_rows
from tandem.decode.recording.replay import ReplayedStep
from tandem.experts.execution.executor import CpuExecutor
from tandem.hf.finite import require_finite_logits
from tandem.kernels.attention import Segment
from tandem.kernels.dense import VALUE_DTYPES, CpuThreads

# Bounds the activations of a long prompt; experts are read once per chunk.
MAX_STEP_TOKENS = 2048


class CachedRows:
    """Rows of one batch on Tandem's KV cache."""

    def __init__(
        self,
        model: Any,
        threads: CpuThreads,
        prompts: list[list[int]],
        max_new_tokens: int,
        *,
        has_replay: bool = True,
        kv_dtype: str = "auto",
    ) -> None:
        """Take the prompts as token ids, none empty; nothing is computed yet.

        Without `has_replay` the model's own code runs every step. `kv_dtype` is as of `KvCache`.
        """
        capacity = max(map(len, prompts)) + min(max_new_tokens, MAX_STEP_TOKENS)
        self.cache = KvCache(threads, len(prompts), capacity, kv_dtype=kv_dtype)
        self._model = ModelRunner(model, self.cache, threads)
        self._tokens: list[list[int]] = [[] for _ in prompts]  # what the cache holds
        self._prompts = list(prompts)
        self.reused_tokens = [0] * len(prompts)
        """Per row, what the cache held of its prompt."""
        with torch.inference_mode(False):
            self._ids = torch.zeros((len(prompts), 1), dtype=torch.int64)
        self._has_replay = has_replay
        self._executor = self._model.executor
        self.step = self._new_step()

    @property
    def num_rows(self) -> int:
        """Rows of the batch."""
        return len(self._prompts)

    def continue_with(self, prompts: list[list[int]]) -> None:
        """Take other prompts, as many; what a row shares with what it holds stays."""
        assert len(prompts) == len(self._prompts)
        self._prompts = list(prompts)
        for row, (held, prompt) in enumerate(zip(self._tokens, prompts, strict=True)):
            shared = self.cache.usable(row, num_shared(held, prompt))
            self.cache.truncate(row, shared)
            del held[shared:]
            self.reused_tokens[row] = shared

    def pretend(self, depth: int) -> None:
        """Let every row hold `depth` random tokens before its prompt, to time what follows."""
        prompts = self._prompts
        self.continue_with([[0]] * self.num_rows)
        self.prefill()  # makes the KV cache's layers
        self.cache.reserve(depth + max(map(len, prompts)) + MAX_STEP_TOKENS)
        self.cache.pretend(depth)
        self._tokens = [[-1] * depth for _ in prompts]
        self._prompts = [[-1] * depth + prompt for prompt in prompts]

    def prefill(self) -> Tensor:
        """Run the prompts; return the logits of each row's next token: (rows, vocabulary)."""
        logits: list[Tensor] = [torch.empty(0)] * len(self._prompts)
        for segments in self._chunks():
            found = self._forward(
                segments,
                [self._prompts[s.row][s.first_position :][: s.num_tokens] for s in segments],
            )
            for segment, row_logits in zip(segments, found, strict=True):
                logits[segment.row] = row_logits
        return self._checked(torch.stack(logits))

    def decode(self, tokens: list[int]) -> Tensor:
        """Append one token per row; return the logits of the next: (rows, vocabulary)."""
        self.cache.begin_decode()
        self._ids.copy_(torch.tensor(tokens)[:, None])
        self._announce(tokens)
        logits = self.step()
        self.cache.commit()
        for held, token in zip(self._tokens, tokens, strict=True):
            held.append(token)
        return self._checked(logits)

    def _checked(self, logits: Tensor) -> Tensor:
        """Return the logits (rows, vocabulary), if they are finite; else forget the rows."""
        try:
            require_finite_logits(self._model.model, logits, self._tokens.__getitem__)
        except ExecutionError:
            for row, held in enumerate(self._tokens):
                self.cache.truncate(row, 0)
                held.clear()
            raise
        return logits

    def _chunks(self) -> list[list[Segment]]:
        """Cut what the prompts add to the cache into steps of bounded size."""
        chunks: list[list[Segment]] = [[]]
        room = MAX_STEP_TOKENS
        for row, prompt in enumerate(self._prompts):
            first = self.cache.lengths[row]
            while first < len(prompt):
                if room == 0:
                    chunks.append([])
                    room = MAX_STEP_TOKENS
                count = min(room, len(prompt) - first)
                chunks[-1].append(Segment(row, first, count))
                first, room = first + count, room - count
        return chunks

    def _decode_step(self) -> Tensor:
        """Run `_ids` (rows, 1) at the cache's positions: (rows, vocabulary)."""
        return self._model.logits(self._ids, self.cache.positions[:, None])[:, -1]

    def _new_step(self) -> ReplayedStep:
        inputs = [self._ids, self.cache.positions]
        dtype, threads = self._model.model.dtype, self.cache.threads
        step = ReplayedStep(self._decode_step, inputs, dtype, threads, self._executor)
        if not self._has_replay:
            step.why_not = "replay is disabled (has_replay=False)"
        elif getattr(self._executor, "foresee", None) is not None:
            step.why_not = "routers are asked ahead, which a recorded step leaves out"
        return step

    def _announce(self, tokens: list[int]) -> None:
        """Tell the executor what the model's forward would; a new executor needs a new graph."""
        executor = self._model.executor
        if executor is not self._executor:
            self._executor, self.step = executor, self._new_step()
        elif self.step.is_replaying and not isinstance(executor, CpuExecutor | None):
            executor.begin_step(tokens, is_prefill=False)

    @torch.inference_mode()
    def _forward(self, segments: list[Segment], tokens: list[list[int]]) -> Tensor:
        """Run the tokens of each segment; return the logits at its end: (segments, vocabulary)."""
        ids = [token for part in tokens for token in part]
        lasts = torch.tensor([s.num_tokens for s in segments]).cumsum(0) - 1
        self.cache.begin(segments)
        logits = self._model.logits(torch.tensor([ids]), self.cache.positions[None], lasts)[0]
        self.cache.commit()
        for segment, part in zip(segments, tokens, strict=True):
            self._tokens[segment.row] += part
        return logits if self._model.keeps_logits else logits[lasts]


def num_shared(held: list[int], prompt: list[int]) -> int:
    """Count the tokens that both begin with; the prompt's last one is computed again."""
    most = min(len(held), len(prompt) - 1)
    return next((i for i in range(most) if held[i] != prompt[i]), most)


def try_rows(model: Any, threads: CpuThreads, prompt: list[int]) -> str | None:
    """Step a few tokens both ways; return why `CachedRows` does not serve a model, or None."""
    if model.device.type != "cpu" or model.dtype not in VALUE_DTYPES:
        return f"the model is {model.dtype} on {model.device.type}"
    return why_not_by_rows(model, prompt, lambda prompts: CachedRows(model, threads, prompts, 2))
