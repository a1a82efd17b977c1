"""Steps rows of any position through a model as one sequence, on Tandem's KV cache.

For models whose attention goes through Transformers' attention functions and whose layers keep
nothing but keys and values. Whether that holds is found by trying: `try_rows`.
"""

from typing import Any

import torch
from torch import Tensor

from tandem.hf.attention import AttentionSwitch
from tandem.hf.kv_cache import KvCache, NotByRowsError, stepping, transformers_cache
from tandem.hf.stepping import PaddedRows
from tandem.kernels.attention import Segment
from tandem.kernels.dense import VALUE_DTYPES, CpuThreads

# Bounds the activations of a long prompt; experts are read once per chunk.
MAX_STEP_TOKENS = 2048
# How far logits may be from those of Transformers' own caches, relative to their size. Mistakes
# show as an error of about one; bf16 rounds differently, and near ties of the router may flip.
_TOLERANCES = {torch.float32: 1e-3, torch.bfloat16: 0.15}
_TRIAL_TOKENS = 6


class CachedRows:
    """Rows of one batch on Tandem's KV cache."""

    def __init__(
        self, model: Any, threads: CpuThreads, prompts: list[list[int]], max_new_tokens: int
    ) -> None:
        """Take the prompts as token ids, none empty; nothing is computed yet."""
        self._model = model
        self._switch = AttentionSwitch(model)
        capacity = max(map(len, prompts)) + min(max_new_tokens, MAX_STEP_TOKENS)
        self.cache = KvCache(threads, len(prompts), capacity)
        self._shell = transformers_cache(model, self.cache)
        self._tokens: list[list[int]] = [[] for _ in prompts]  # what the cache holds
        self._prompts = list(prompts)
        self._keeps_logits = bool(model._supports_logits_to_keep())
        self.reused_tokens = 0

    def continue_with(self, prompt: list[int]) -> None:
        """Take another prompt for the only row; what it shares with the last one stays."""
        held = self._tokens[0]
        pairs = zip(held, prompt[:-1], strict=False)  # the last token's logits are wanted anew
        shared = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
        if shared is None:
            shared = min(len(held), len(prompt) - 1)
        self.cache.truncate(0, shared)
        del held[shared:]
        self._prompts = [prompt]
        self.reused_tokens = shared

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
        return torch.stack(logits)

    def decode(self, tokens: list[int]) -> Tensor:
        """Append one token per row; return the logits of the next: (rows, vocabulary)."""
        segments = [Segment(row, length, 1) for row, length in enumerate(self.cache.lengths)]
        return self._forward(segments, [[token] for token in tokens])

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

    @torch.inference_mode()
    def _forward(self, segments: list[Segment], tokens: list[list[int]]) -> Tensor:
        """Run the tokens of each segment; return the logits at its end: (segments, vocabulary)."""
        ids = [token for part in tokens for token in part]
        lasts = torch.tensor([s.num_tokens for s in segments]).cumsum(0) - 1
        self.cache.begin(segments)
        keep = {"logits_to_keep": lasts} if self._keeps_logits else {}
        with self._switch.on(), stepping(self.cache):
            outputs = self._model(
                input_ids=torch.tensor([ids]),
                position_ids=self.cache.positions[None],
                past_key_values=self._shell,
                use_cache=True,
                return_dict=True,
                **keep,
            )
        self.cache.commit()
        for segment, part in zip(segments, tokens, strict=True):
            self._tokens[segment.row] += part
        logits: Tensor = outputs.logits[0]
        return logits if self._keeps_logits else logits[lasts]


def try_rows(model: Any, threads: CpuThreads, prompt: list[int]) -> str | None:
    """Step a few tokens both ways; return why `CachedRows` does not serve a model, or None."""
    if model.device.type != "cpu" or model.dtype not in VALUE_DTYPES:
        return f"the model is {model.dtype} on {model.device.type}"
    trial = (prompt * _TRIAL_TOKENS)[:_TRIAL_TOKENS]
    prompts = [trial, trial[:2]]
    try:
        rows = CachedRows(model, threads, prompts, 2)
        ours = [rows.prefill(), rows.decode(trial[:2])]
    except (
        NotByRowsError,
        RuntimeError,
        ValueError,
        TypeError,
        AttributeError,
        IndexError,
    ) as error:
        return str(error).partition("\n")[0] or type(error).__name__
    padded = PaddedRows(model, prompts, 0)
    theirs = [padded.prefill(), padded.decode(trial[:2])]
    tolerance = _TOLERANCES[model.dtype]
    for a, b in zip(ours, theirs, strict=True):
        if not (a.float() - b.float()).norm() <= tolerance * b.float().norm():
            return "its logits differ"
    return None
