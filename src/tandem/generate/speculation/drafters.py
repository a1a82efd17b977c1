"""Makes drafters, by name, for the model that verifies their drafts."""

import time
import warnings
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from tandem.core.errors import ConfigError, TandemError, TandemWarning
from tandem.core.registry import Registry
from tandem.decode.cpu_slots import CpuSlotPool
from tandem.decode.mtp.loading import load_mtp
from tandem.foreign_types import PreTrainedModel
from tandem.generate.next_token_models import vocabulary_size
from tandem.generate.speculation.draft_model import DraftModel
from tandem.generate.speculation.mtp import MtpDrafter
from tandem.generate.speculation.mtp_layer import MtpLayer
from tandem.generate.speculation.speculation import Speculation
from tandem.generate.speculation.touched_experts import touched_experts
from tandem.hf.dense import share_threads
from tandem.hf.runtime import runtime_of
from tandem.kernels.dense import CpuThreads
from tandem.policy.speculation.free_drafts import FreeDrafts
from tandem.policy.speculation.paid_drafts import PaidDrafts
from tandem.policy.speculation.plans import Drafting
from tandem.policy.speculation.prompt_lookup import EarlierAnswers, PromptLookup
from tandem.policy.speculation.step_costs import TOUCHED, StepCosts


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftParts:
    """The models and options from which drafters are made."""

    model: PreTrainedModel
    """The model that verifies the drafts."""
    threads: CpuThreads
    draft: PreTrainedModel | None = None
    """A small model with the same vocabulary."""
    shares_answers: bool = True
    """Whether prompt look-up searches earlier answers too, not just the request's own text."""
    mtp_from: Path | None = None
    """The checkpoint that has the MTP layer, if the model's own checkpoint has none."""


DRAFTERS: Registry[Drafting | DraftModel] = Registry("drafter")


@DRAFTERS.register("lookup")
def _lookup(parts: DraftParts) -> Drafting:
    if not parts.shares_answers:
        return FreeDrafts(PromptLookup)
    return FreeDrafts(partial(PromptLookup, EarlierAnswers()))


@DRAFTERS.register("model")
def _draft_model(parts: DraftParts) -> DraftModel:
    if parts.draft is None:
        raise ConfigError("there is no model to draft with; give one with --draft MODEL")
    runtime = runtime_of(parts.draft)
    if runtime is not None:
        runtime.share(parts.threads)
    share_threads(parts.draft, parts.threads)
    new_pool = partial(CpuSlotPool, parts.draft, parts.threads)
    return DraftModel(new_pool, vocabulary_size(parts.model))


@DRAFTERS.register("mtp")
def _mtp(parts: DraftParts) -> DraftModel:
    layers = []
    for depth, (head, embedding) in enumerate(load_mtp(parts.model, parts.mtp_from)):
        new_pool = partial(
            CpuSlotPool, head, parts.threads, notes_hidden=True, inputs=embedding.fixed
        )
        layers.append(MtpLayer(new_pool, embedding, depth))
    return MtpDrafter(layers, vocabulary_size(parts.model))


def new_speculation(name: str, parts: DraftParts) -> Speculation | None:
    """Return a `Speculation` for `name`, "auto" or the name of a drafter; None for "none".

    The result always includes prompt look-up, and the draft model if `parts` has one. Raises
    `ConfigError` for an unknown name. A drafter that cannot be made is left out, with a
    `TandemWarning`.
    """
    if name == "none":
        return None
    DRAFTERS.factory("lookup" if name == "auto" else name)
    names = {"lookup", *([] if parts.draft is None else ["model"])} | ({name} - {"auto"})
    made = [_made(each, parts) for each in DRAFTERS if each in names]
    models = [one for one in made if isinstance(one, DraftModel)]
    free = [one for one in made if one is not None and not isinstance(one, DraftModel)]
    ways = [*free, *(PaidDrafts(one, time.perf_counter) for one in models)]
    return Speculation(ways, models, _costs(parts.model))


def _costs(model: PreTrainedModel) -> StepCosts:
    """Return the costs of a model's decode steps, which are measured while the model runs.

    With an expert cache, costs of step sizes that are not measured yet are estimated from the
    experts that tokens use.
    """
    runtime = runtime_of(model)
    cache = None if runtime is None else runtime.executor.cache
    if runtime is None or cache is None:
        return StepCosts()
    return StepCosts(touched_experts(runtime.executor, cache), TOUCHED)


def _made(name: str, parts: DraftParts) -> Drafting | DraftModel | None:
    try:
        return DRAFTERS.factory(name)(parts)
    except TandemError as error:
        warnings.warn(f"nothing is drafted by {name}: {error}", TandemWarning, stacklevel=4)
        return None
