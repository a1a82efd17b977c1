"""Checks the logits of every step for NaN and infinity, and finds the layer that computed them.

The check costs one pass over the logits per step. Layers are searched only if it fails.
"""

import math
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn

from tandem.core.errors import ExecutionError
from tandem.foreign_types import PreTrainedModel

# To find a damaged layer, this many of a sequence's last tokens run again.
_SEARCHED_TOKENS = 2048


def require_finite_logits(
    model: PreTrainedModel, logits: Tensor, tokens_of: Callable[[int], Sequence[int]]
) -> None:
    """Raise `ExecutionError` if `logits` (n_tokens, vocabulary) hold NaN or plus infinity.

    The error names the first module that computed such a value. `tokens_of(i)` returns the tokens
    of the sequence that row i of the logits belongs to. Minus infinity is allowed: models forbid
    tokens with it.
    """
    highest = _waited_for(logits.amax(-1))  # NaN for a row that has one
    if all(map(math.isfinite, highest)):
        return
    row = next(row for row, value in enumerate(highest) if not math.isfinite(value))
    place = _first_spoilt(model, list(tokens_of(row))[-_SEARCHED_TOKENS:])
    where = "no single layer" if place is None else place
    raise ExecutionError(
        f"the model's output is NaN or infinite, first in {where}; its weights are damaged "
        f"(download it again) or too large for {str(model.dtype).removeprefix('torch.')} (load "
        "it with another dtype)"
    )


def _waited_for(values: Tensor) -> list[float]:
    """Return `values` as floats; if they are on a GPU, wait for them with an event.

    The event marks the wait as intended; other ways to read them count as hidden waits.
    """
    host = values
    if values.device.type == "cuda":
        host = torch.empty(values.shape, dtype=values.dtype, device="cpu", pin_memory=True)
        host.copy_(values, non_blocking=True)
        done = torch.cuda.Event()
        done.record(torch.cuda.current_stream(values.device))
        done.synchronize()
    found: list[float] = host.tolist()
    return found


@torch.inference_mode()
def _first_spoilt(model: PreTrainedModel, ids: list[int]) -> str | None:
    """Run tokens again; return the name of the first module that outputs NaN or plus infinity.

    None if no module does.
    """
    found: list[str] = []

    def listener(name: str) -> Callable[..., None]:
        def listen(module: nn.Module, args: object, output: object) -> None:
            if not found and any(bool((x.isnan() | x.isposinf()).any()) for x in _tensors(output)):
                found.append(name)

        return listen

    handles = [m.register_forward_hook(listener(n)) for n, m in model.named_modules() if n]
    try:
        model(input_ids=torch.tensor([ids], device=model.device), use_cache=False)
    finally:
        for handle in handles:
            handle.remove()
    return found[0] if found else None


def _tensors(output: object) -> Iterator[Tensor]:
    parts = output if isinstance(output, tuple | list) else (output,)
    return (part for part in parts if isinstance(part, Tensor) and part.is_floating_point())
