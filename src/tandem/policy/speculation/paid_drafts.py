"""Drafts that take time to make: as many tokens as pay, judging by earlier drafts.

The cost of drafting is measured, like the cost of steps. A drafter is tried a few times at first,
and then once in a while; between trials nothing is drafted unless drafts pay. A drafter that
reports its confidence drafts as many tokens as are likely enough, and the likeliest are verified.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import sqrt
from typing import NamedTuple

from tandem.policy.speculation.acceptance import Acceptance, OpenDraft
from tandem.policy.speculation.drafter import MOST_DRAFTED, Draft, PaidDrafter, SureDraft
from tandem.policy.speculation.plans import Drafts, NextStep, Plan
from tandem.policy.speculation.step_costs import StepCosts

_MOST_STEP_TOKENS = 16
_LEAST_GAIN, _SURE_GAIN = 1.01, 1.3
# Bonus for sizes that are hardly known, so that they get tried.
_HOPE = 0.03
# Number of drafts before the rates are trusted, and their least number of tokens.
_TRIALS, _TRIAL_TOKENS = 6, 2
_TRIALS_AGAIN = 4
# If drafts do not pay, they are tried again after this many steps: at first, and at most.
_TRIED_AGAIN_AFTER, _SELDOM = 64, 1024
# Steps without drafts that are needed to know what those take.
_LEAST_KNOWN = 1
# A model's acceptance rate hardly changes, so about the latest five hundred tokens count. The prior
# is typical of published rates of MTP layers and draft models.
_DECAY, _PRIOR, _PRIOR_WEIGHT = 0.998, 0.7, 5.0
_COMMON_WEIGHT = 40.0
# Drafted tokens are grouped by the drafter's confidence, in tenths; each group has its own rate.
_SURENESSES, _SURENESS_WEIGHT = 10, 10.0
# A token with this chance is drafted however fast steps without drafts are.
_LIKELY = 0.9


class _Terms(NamedTuple):
    """What decides how many tokens a step drafts and verifies, apart from the drafts."""

    batch: int
    length: int
    """Drafted tokens per sequence, if the drafter does not report its confidence."""
    speed: float
    """Expected tokens per second with `length` drafted tokens per sequence."""
    costs: StepCosts
    is_trial: bool


@dataclass(slots=True)
class _Judged:
    """A draft to be judged twice: for the rates by position, and for those by confidence."""

    by_place: OpenDraft
    by_sureness: OpenDraft
    is_cut: bool
    """Whether the draft has fewer tokens than were requested."""


@dataclass(slots=True)
class PaidDrafts:
    """The drafting method whose drafter, one for all sequences, takes time."""

    drafter: PaidDrafter
    clock: Callable[[], float]
    """Returns the current time in seconds, to measure drafting."""
    acceptance: Acceptance = field(
        default_factory=lambda: Acceptance(_DECAY, _PRIOR, _PRIOR_WEIGHT, _COMMON_WEIGHT)
    )
    """By position in the draft: how often a token is drafted and right, given that those before it
    are."""
    sureness: Acceptance = field(
        default_factory=lambda: Acceptance(_DECAY, prior_weight=_SURENESS_WEIGHT)
    )
    """By the drafter's confidence, in tenths: how often a token is right."""
    costs: StepCosts = field(default_factory=lambda: StepCosts(float))
    """The cost of drafting, by the number of tokens per sequence."""
    _open: dict[int, _Judged] = field(default_factory=dict)
    _is_sure: bool = False
    """Whether the drafter reports its confidence."""
    _num_drafts: int = 0
    _num_idle_steps: int = 0
    _patience: int = _TRIED_AGAIN_AFTER

    def plan(self, step: NextStep) -> Plan | None:
        """Return the plan with the best number of drafted tokens, or a trial.

        Returns None if there is no room for drafts, or before any step was measured. Also returns
        None while no step without drafts was measured for comparison, unless drafts promise a large
        gain.
        """
        histories, rooms, batch, costs = step
        for slot, tokens in histories.items():
            self._judge(slot, tokens)
        one = costs.seconds(batch)
        wanting = {slot: tokens for slot, tokens in histories.items() if rooms[slot] > 0}
        longest = (_MOST_STEP_TOKENS - batch) // max(1, len(wanting))
        counts = range(1, min(MOST_DRAFTED, longest) + 1)
        if one is None or not wanting or not counts:
            return None
        is_trial = self._is_trial()
        gains = self._gains(counts, one, len(wanting), batch, costs)
        count = self._best(gains, len(wanting), batch, costs)
        if costs.num_known(batch) < _LEAST_KNOWN and gains[count] < _SURE_GAIN:
            return None  # first measure what drafts are compared with
        if is_trial:
            count = min(max(count, _TRIAL_TOKENS), counts[-1])
        elif gains[count] > _LEAST_GAIN:
            self._patience = _TRIED_AGAIN_AFTER
        terms = _Terms(batch, count, gains[count] * batch / one, costs, is_trial)
        num_requested = counts[-1] if self._is_sure and not is_trial else count
        most = {slot: min(num_requested, rooms[slot]) for slot in wanting}
        gain = float("inf") if is_trial else gains[count]
        return Plan(gain, _LEAST_GAIN, partial(self._draft, wanting, most, terms))

    def forget(self, slot: int) -> None:
        """Drop the draft of a finished request."""
        self._open.pop(slot, None)

    def _judge(self, slot: int, tokens: Sequence[int]) -> None:
        """Compare a slot's last draft with the new tokens."""
        judged = self._open.get(slot)
        if judged is None:
            return
        judged.by_place.judge(tokens, self.acceptance)
        judged.by_sureness.judge(tokens, self.sureness)
        if not judged.by_place.is_open:
            if judged.is_cut and not judged.by_place.is_wrong:
                self.acceptance.add(judged.by_place.num_judged, is_hit=False)
            del self._open[slot]

    def _is_trial(self) -> bool:
        """Tell whether to try drafts even if they seem not to pay; must be called once per step."""
        self._num_idle_steps += 1
        if self._num_idle_steps > self._patience:
            self._num_drafts = _TRIALS - _TRIALS_AGAIN
            self._patience = min(_SELDOM, 2 * self._patience)
            return True
        return self._num_drafts < _TRIALS

    def _gains(
        self, counts: Sequence[int], one: float, num_drafting: int, batch: int, costs: StepCosts
    ) -> dict[int, float]:
        """Return, by number of drafted tokens per sequence, the speed relative to no drafts."""
        chances, gains = self.acceptance.chances(range(counts[-1])), {}
        for count in counts:
            verified = costs.seconds(batch + count * num_drafting) or one
            seconds = verified + (self.costs.seconds(count) or 0.0)
            tokens = batch + num_drafting * sum(chances[:count])
            gains[count] = tokens / seconds * one / batch
        return gains

    def _best(
        self, gains: Mapping[int, float], num_drafting: int, batch: int, costs: StepCosts
    ) -> int:
        def hoped(count: int) -> float:
            num_known = costs.num_known(batch + count * num_drafting)
            return gains[count] * (1 + _HOPE / sqrt(1 + num_known))

        return max(gains, key=hoped)

    def _draft(
        self, histories: Mapping[int, Sequence[int]], most: Mapping[int, int], terms: _Terms
    ) -> Drafts:
        start = self.clock()
        found = self.drafter.draft(histories, most, 0.0 if terms.is_trial else self._least(terms))
        length = max((len(draft.tokens) for draft in found.values()), default=terms.length)
        self.costs.add(max(1, length), self.clock() - start)
        self._num_drafts += 1
        self._num_idle_steps = 0
        for slot in most:
            self._note(slot, found.get(slot, SureDraft(())), len(histories[slot]), most[slot])
        if terms.is_trial or not self._is_sure:
            return {slot: draft.tokens for slot, draft in found.items() if len(draft.tokens)}
        return self._worth(found, terms)

    def _note(self, slot: int, draft: SureDraft, length: int, num_requested: int) -> None:
        """Keep a slot's draft, made after `length` tokens of its sequence, to be judged later."""
        tokens, count = draft.tokens, len(draft.tokens)
        if not count:  # an empty draft took time, too
            self.acceptance.add(0, is_hit=False)
        self._is_sure = self._is_sure or bool(draft.sureness)
        surenesses = _kinds(draft.sureness)
        self._open[slot] = _Judged(
            OpenDraft(Draft(tokens, range(count)), length),
            OpenDraft(Draft(tokens[: len(surenesses)], surenesses), length),
            0 < count < num_requested,
        )

    def _least(self, terms: _Terms) -> float:
        """Return the least chance at which a token pays: that it and all before it are right."""
        costs, most = terms.costs, terms.batch + terms.length
        verified = (costs.seconds(most + 1) or 0.0) - (costs.seconds(most) or 0.0)
        drafted = (self.costs.seconds(terms.length) or 0.0) / terms.length
        return min(_LIKELY, terms.speed * (verified + drafted))

    def _worth(self, found: Mapping[int, SureDraft], terms: _Terms) -> Drafts:
        """Return the likeliest drafted tokens by slot.

        Their number maximises the expected tokens minus `terms.speed` times the step's seconds.
        """
        chances = sorted(
            (
                (chance, slot)
                for slot, (_, estimates) in found.items()
                for chance in self.sureness.chances(_kinds(estimates), estimates)
            ),
            reverse=True,
        )
        tokens, taken = 0.0, dict.fromkeys(found, 0)
        best, kept = -terms.speed * (terms.costs.seconds(terms.batch) or 0.0), dict(taken)
        for count, (chance, slot) in enumerate(chances, 1):
            tokens += chance
            taken[slot] += 1
            gain = tokens - terms.speed * (terms.costs.seconds(terms.batch + count) or 0.0)
            if gain > best:
                best, kept = gain, dict(taken)
        return {slot: found[slot].tokens[:count] for slot, count in kept.items() if count}


def _kinds(sureness: Sequence[float]) -> list[int]:
    """Return the group of each confidence: its tenth, 0 to 9. Tokens of one group share a rate."""
    return [min(_SURENESSES - 1, int(sure * _SURENESSES)) for sure in sureness]
