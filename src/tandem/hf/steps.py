"""Tells the executor about every forward pass of a model before it begins."""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from tandem.hf.row_cache import current_cache
from tandem.hf.step_recorder import is_capturing
from tandem.offload.executor import CpuExecutor, Executor


def announce_steps(model: Any, executor: Callable[[], Executor]) -> None:
    """Announce each forward pass: its token ids, and whether it is a prompt.

    `executor` is asked each time, as it may be replaced while the model lives.
    """

    def announce(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        current = executor()
        if isinstance(current, CpuExecutor):
            return  # nothing is planned; a compiled model stays whole
        if is_capturing():
            return  # what is captured is announced with every replay
        ids = kwargs.get("input_ids", args[0] if args else None)
        if isinstance(ids, Tensor) and ids.dim() == 2:
            current.begin_step(ids.flatten().tolist(), is_prefill=_is_prefill(ids))
        else:
            current.begin_step((), is_prefill=False)

    model.register_forward_pre_hook(announce, with_kwargs=True)


def _is_prefill(ids: Tensor) -> bool:
    """Tell whether any sequence adds more than one token."""
    if ids.shape[1] == 1:
        return False
    cache = current_cache()  # of a step whose rows lie one after another in one row of ids
    if cache is None:
        return True
    rows: list[int] = cache.rows.tolist()
    return len(set(rows)) < len(rows)
