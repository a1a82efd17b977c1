"""A model that is stepped by rows: a forward on a KV cache of ours, and whether that serves it."""

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from tandem.core.errors import TandemError
from tandem.decode.attention import register_attention
from tandem.decode.kv_cache.base import NotByRowsError, RowCache, stepping, transformers_cache
from tandem.decode.norms import NormSwitch
from tandem.decode.padded import PaddedRows
from tandem.decode.shallow_copy import ShallowCopy
from tandem.experts.execution.executor import Executor
from tandem.experts.tracing.events import unheard
from tandem.hf.compat import takes_logits_to_keep
from tandem.hf.config_values import foreign_errors
from tandem.hf.runtime import runtime_of
from tandem.kernels.dense import CpuThreads

# How far logits may be from those of Transformers' own caches, relative to their size. Mistakes
# show as an error of about one; low precision rounds differently, and near ties of the router may
# flip.
_TOLERANCES = {torch.float32: 1e-3, torch.bfloat16: 0.15, torch.float16: 0.05}
_TRIAL_TOKENS = 6
_STEP_TOKENS = 64  # more are a prompt's; steps are recorded as the model does them


class ModelRunner:
    """A model with a cache that it reads and writes while it is called here."""

    def __init__(self, model: Any, cache: RowCache, threads: CpuThreads | None = None) -> None:
        """Raises `NotByRowsError` for a model that keeps more than keys and values.

        With `threads`, a prompt's norms are native.
        """
        self.model = model
        self._cache = cache
        self._norms = NormSwitch(model, threads)
        self._copy = ShallowCopy(model, register_attention(), self._norms.forwards)
        self._shell = transformers_cache(model, cache)
        self.keeps_logits = takes_logits_to_keep(model)
        """Whether logits can be asked for some of the tokens alone."""

    @property
    def executor(self) -> Executor | None:
        """What computes the model's experts now; None for a model that Tandem did not load."""
        runtime = runtime_of(self.model)
        return None if runtime is None else runtime.executor

    def logits(self, ids: Tensor, positions: Tensor, keep: Tensor | int | None = None) -> Tensor:
        """Return the logits (b, n_tokens, vocabulary) of ids (b, n_tokens) at their positions.

        With `keep`, of those tokens alone, where the model can leave the others out.
        """
        is_kept = keep is not None and self.keeps_logits
        self._norms.is_on = ids.numel() > _STEP_TOKENS
        with stepping(self._cache):
            outputs = self._copy.model(
                input_ids=ids,
                position_ids=positions,
                past_key_values=self._shell,
                use_cache=True,
                return_dict=True,
                **({"logits_to_keep": keep} if is_kept else {}),
            )
        logits: Tensor = outputs.logits
        return logits


class StartedRows(Protocol):
    """A batch of prompts that is stepped."""

    def prefill(self) -> Tensor:
        """Run the prompts; return (rows, vocabulary)."""

    def decode(self, tokens: list[int]) -> Tensor:
        """Append one token per row; return (rows, vocabulary)."""


def why_not_by_rows(
    model: Any, prompt: list[int], start: Callable[[list[list[int]]], StartedRows]
) -> str | None:
    """Step a few tokens by rows and padded; return why rows do not serve a model, or None.

    `start` returns rows of prompts. Raises the `TandemError` of a model that cannot be run at all.
    """
    tolerance = _TOLERANCES.get(model.dtype)
    if tolerance is None:
        return f"the model is {model.dtype}"
    runtime = runtime_of(model)
    with unheard(None if runtime is None else runtime.executor):
        return _why_other_logits(model, prompt, start, tolerance)


def _why_other_logits(
    model: Any,
    prompt: list[int],
    start: Callable[[list[list[int]]], StartedRows],
    tolerance: float,
) -> str | None:
    trial = (prompt * _TRIAL_TOKENS)[:_TRIAL_TOKENS]
    prompts = [trial, trial[:2]]
    try:
        rows = start(prompts)
        ours = [rows.prefill(), rows.decode(trial[:2])]
    except TandemError:
        raise
    except (
        NotByRowsError,
        RuntimeError,
        ValueError,
        TypeError,
        AttributeError,
        IndexError,
    ) as error:
        return str(error).partition("\n")[0] or type(error).__name__
    with foreign_errors(f"{type(model).__name__} cannot run a prompt with this config.json"):
        padded = PaddedRows(model, prompts, 0)
        theirs = [padded.prefill(), padded.decode(trial[:2])]
    for a, b in zip(ours, theirs, strict=True):
        if not (a.float() - b.float()).norm() <= tolerance * b.float().norm():
            return "its logits differ"
    return None
