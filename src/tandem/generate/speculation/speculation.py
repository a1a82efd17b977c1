"""Decides which drafted tokens a decode step verifies, by measured costs.

A step of more tokens takes longer, because it reads more experts; each drafted token is right with
some probability. `Speculation.choose` selects the drafts that give the most tokens per second,
often none. The answer is the same in any case.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from tandem.decode.slots import SlotPool
from tandem.experts.tracing.events import ExpertStatistics
from tandem.generate.speculation.draft_counts import DraftCounts
from tandem.generate.speculation.draft_model import DraftModel
from tandem.policy.speculation.plans import Drafting, Drafts, NextStep, best_plan
from tandem.policy.speculation.step_costs import StepCosts


@dataclass(slots=True)
class Speculation:
    """Drafts tokens for the requests of one scheduler."""

    ways: Sequence[Drafting]
    models: Sequence[DraftModel] = ()
    """The draft models that `ways` use; they draft in slots of their own."""
    costs: StepCosts = field(default_factory=StepCosts)
    counts: DraftCounts = field(default_factory=DraftCounts)
    why_none: str | None = None
    """Why the latest steps could not verify drafted tokens, as one sentence; None: they could."""
    experts: ExpertStatistics | None = None
    """Counts the expert bytes that steps read, for `counts.saved_bytes`; None: not counted."""
    on_kept: Callable[[int, int], None] | None = None
    """Called with the arguments of `note_kept`, after each step that verified drafted tokens."""
    _read_before: ExpertStatistics | None = None

    @property
    def needs_hidden(self) -> bool:
        """Whether a drafter reads the hidden states that enter the model's output head."""
        return any(model.needs_hidden for model in self.models)

    def follow(self, pool: SlotPool) -> None:
        """Draft from now on for the sequences in the slots of `pool`."""
        for model in self.models:
            model.follow(pool)

    def can_verify(self, pool: SlotPool) -> bool:
        """Tell whether steps of a pool can verify drafted tokens; if not, `why_none` says why."""
        self.why_none = pool.why_no_drafts
        return self.why_none is None

    def choose(
        self, histories: Mapping[int, Sequence[int]], rooms: Mapping[int, int], batch: int
    ) -> Drafts:
        """Return the drafted tokens that the next step should verify, by `best_plan`; often none.

        The drafts are by slot. `histories` has, by slot, all tokens of each request that may have
        drafts; `rooms` has, by slot, the largest number of tokens that may be drafted. `batch` is
        the number of requests that decode in the step.
        """
        plan = best_plan(self.ways, NextStep(histories, rooms, batch, self.costs))
        drafts = plan.drafts() if plan is not None and plan.is_worth else {}
        self.counts.add(sum(map(len, drafts.values())), is_unpaid=plan is not None and not drafts)
        self._read_before = replace(self.experts) if self.experts and drafts else None
        return drafts

    def note_kept(self, num_tokens: int, num_kept: int) -> None:
        """Record that a verifying step computed `num_tokens` tokens and `num_kept` were kept.

        Both numbers include the tokens that were not drafted.
        """
        if self.experts is not None and self._read_before is not None:
            self.counts.add_read(self.experts, self._read_before, num_kept / num_tokens)
        if self.on_kept is not None:
            self.on_kept(num_tokens, num_kept)

    def forget(self, slot: int) -> None:
        """Drop the drafters' data about a slot's request, which has ended."""
        for way in self.ways:
            way.forget(slot)
