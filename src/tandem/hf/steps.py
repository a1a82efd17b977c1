"""Announces every forward pass of a model to the executor."""

from collections.abc import Callable
from contextvars import ContextVar

import torch
from torch import Tensor

from tandem.foreign_types import PreTrainedModel
from tandem.hf.runtime import Runtime
from tandem.kernels.opaque_calls import is_capturing

# Limits the activations of a long prompt. Experts are read or fetched once per this many tokens.
MAX_STEP_TOKENS = 2048

SEQUENCES: ContextVar[Callable[[], Tensor] | None] = ContextVar("tandem_sequences", default=None)
"""Set while one row of ids contains several sequences: returns the sequence of each token,
(n_tokens,)."""


def announce_steps(model: PreTrainedModel, runtime: Runtime) -> None:
    """Announce each forward pass to the executor: its token ids, and whether it is a prompt.

    A pass that cannot complete, as in a forked process, is refused before torch would wait for
    threads that do not exist.
    """

    def announce(module: object, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        if not torch.compiler.is_compiling():
            runtime.require_here()
        current = runtime.executor
        if not current.needs_steps:
            return  # avoids a graph break in a compiled model
        if is_capturing():
            return  # replaying a captured step announces it
        ids = kwargs.get("input_ids", args[0] if args else None)
        if isinstance(ids, Tensor) and ids.dim() == 2:
            current.begin_step(ids.flatten().tolist(), is_prefill=_is_prefill(ids))
        else:
            current.begin_step((), is_prefill=False)

    model.register_forward_pre_hook(announce, with_kwargs=True)


def _is_prefill(ids: Tensor) -> bool:
    """Tell whether a step, with token ids `ids`, adds several tokens to one of its sequences."""
    if ids.shape[1] == 1:
        return False
    sequences = SEQUENCES.get()
    if sequences is None:
        return True
    of_tokens: list[int] = sequences().tolist()
    return len(set(of_tokens)) < len(of_tokens)
