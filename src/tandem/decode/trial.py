"""Tests sequence slots: compares logits of a few tokens with those on Transformers' own caches."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tandem.checkpoint.config_values import foreign_errors
from tandem.core.errors import TandemError
from tandem.decode.model_runner import executor_of, tolerance_of
from tandem.decode.padded import PaddedBatch
from tandem.decode.slots import CachedSlotPool
from tandem.experts.execution.executor import unheard
from tandem.foreign_types import PreTrainedModel
from tandem.hf.compat import reference_warnings_held, repeat_warnings
from tandem.hf.lookahead.warm_up import warm_up_ids
from tandem.kv_cache.base import NotInSlotsError

# How far logits may be from those with Transformers' own caches, relative to their size. A mistake
# gives an error of about one for any tokens. Low precision gives small errors, and so does rounding
# activations to integers for packed weights: a difference in the last digit of an fp32 value may
# round to another integer.
_TOLERANCES = {torch.float32: 1e-3, torch.bfloat16: 0.15, torch.float16: 0.05}
_TRIAL_TOKENS = 6
# A near tie of a router may flip for some tokens, but hardly in all of these trials.
_TRIAL_FIRST_IDS = range(11, 17)
_OTHER_LOGITS = "its logits differ"
# What a model's own code raises if slots cannot serve it.
NOT_IN_SLOTS = (NotInSlotsError, RuntimeError, ValueError, TypeError, AttributeError, IndexError)

# Returns a pool with this many slots.
NewPool = Callable[[int], CachedSlotPool[Any]]


def why_other_logits(model: PreTrainedModel, new_pool: NewPool) -> str | None:
    """Compare slots' logits with `PaddedBatch`'s; return why slots fail, None if logits agree.

    `new_pool(n)` must return a pool of n slots. Raises `TandemError` if the model cannot run at
    all.
    """
    tolerance = tolerance_of(model, _TOLERANCES)
    if tolerance is None:
        return f"the model is {model.dtype}"
    with unheard(executor_of(model)), reference_warnings_held() as held:
        why = _why_other_logits(model, new_pool, tolerance)
    if why is not None:
        repeat_warnings(held)
    return why


def _why_other_logits(model: PreTrainedModel, new_pool: NewPool, tolerance: float) -> str | None:
    nearest = torch.tensor(float("inf"), device="cpu")
    for first in _TRIAL_FIRST_IDS:
        trial: list[int] = warm_up_ids(model, _TRIAL_TOKENS, first=first).tolist()
        errors = _errors_of(trial, model, new_pool)
        if isinstance(errors, str):
            return errors
        nearest = torch.fmin(nearest, errors)
        if bool((nearest <= tolerance).all()):
            return None
    return _OTHER_LOGITS


def _errors_of(trial: list[int], model: PreTrainedModel, new_pool: NewPool) -> Tensor | str:
    """Run two prompts and a decode step after each in slots; return the errors of the four logits.

    An error is relative to the logits with Transformers' own caches. One prompt is `trial`, the
    other its first two tokens. If the slots cannot run them, return the exception's message.
    """
    prompts = [trial, trial[:2]]
    try:
        pool = new_pool(len(prompts))
        ours = [pool.prefill(dict(enumerate(prompts))), pool.decode(dict(enumerate(trial[:2])))]
    except TandemError:
        raise
    except NOT_IN_SLOTS as error:
        return str(error).partition("\n")[0] or type(error).__name__
    with foreign_errors(f"{type(model).__name__} cannot run a prompt with this config.json"):
        # One prompt per batch: some models' own code treats padding as part of the prompt.
        alone = [PaddedBatch(model, [prompt], 0) for prompt in prompts]
        theirs = [torch.cat([one.prefill() for one in alone])]
        theirs.append(torch.cat([one.decode([trial[i]]) for i, one in enumerate(alone)]))
    a, b = torch.cat(ours).float(), torch.cat(theirs).float()  # (prompts and steps, vocabulary)
    errors: Tensor = (a - b).norm(dim=1) / b.norm(dim=1)
    return errors.cpu()
