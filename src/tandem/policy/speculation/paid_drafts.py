"""Drafts that take time to make: as many tokens as pay, by how often those before came true.

What a draft costs is measured like what a step costs. A drafter is tried a few times at first, and
again once in a while; in between nothing is drafted where that does not pay.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import sqrt

from tandem.policy.speculation.acceptance import Acceptance, OpenDraft
from tandem.policy.speculation.drafter import MOST_DRAFTED, Draft, PaidDrafter
from tandem.policy.speculation.plans import Drafts, Plan
from tandem.policy.speculation.step_costs import StepCosts

# Drafted tokens of each sequence: each makes a step of another size, which is recorded once.
_COUNTS = (1, 2, 3, 4, 5, 6, MOST_DRAFTED)
_MOST_STEP_TOKENS = 16
_LEAST_GAIN, _SURE_GAIN = 1.03, 1.3
# Sizes that are hardly known are taken for so much better than they seem.
_HOPE = 0.03
# Drafts before the rates are believed, and how many tokens they have at least.
_TRIALS, _TRIAL_TOKENS = 6, 2
_TRIALS_AGAIN = 4
# Steps after which one is tried again where that does not pay: at first, and at last.
_TRIED_AGAIN_AFTER, _SELDOM = 64, 1024
# Steps without drafts by which it is known what these would take.
_LEAST_KNOWN = 1
# A model's drafts come true about as often all the time: the latest two hundred tokens count. What
# is published of MTP layers and draft models lies around the prior.
_DECAY, _PRIOR, _PRIOR_WEIGHT = 0.995, 0.7, 5.0


@dataclass(slots=True)
class PaidDrafts:
    """One drafter for all sequences."""

    drafter: PaidDrafter
    clock: Callable[[], float]
    """Tells the seconds that drafting takes."""
    acceptance: Acceptance = field(
        default_factory=lambda: Acceptance(_DECAY, _PRIOR, _PRIOR_WEIGHT, follows=True)
    )
    costs: StepCosts = field(default_factory=lambda: StepCosts(float))
    """Of drafting so many tokens for each sequence."""
    _open: dict[int, OpenDraft] = field(default_factory=dict)
    _num_drafts: int = 0
    _num_idle_steps: int = 0
    _patience: int = _TRIED_AGAIN_AFTER

    def plan(
        self,
        histories: Mapping[int, Sequence[int]],
        rooms: Mapping[int, int],
        batch: int,
        costs: StepCosts,
    ) -> Plan | None:
        """Return the number of drafted tokens that makes the most tokens a second, or a trial."""
        for slot, tokens in histories.items():
            if slot in self._open and not self._open[slot].judge(tokens, self.acceptance):
                del self._open[slot]
        one = costs.seconds(batch)
        wanting = {slot: tokens for slot, tokens in histories.items() if rooms[slot] > 0}
        counts = [n for n in _COUNTS if batch + n * len(wanting) <= _MOST_STEP_TOKENS]
        if one is None or not wanting or not counts:
            return None
        self._num_idle_steps += 1
        is_trial = self._num_drafts < _TRIALS or self._num_idle_steps > self._patience
        if self._num_idle_steps > self._patience:
            self._num_drafts = _TRIALS - _TRIALS_AGAIN
            self._patience = min(_SELDOM, 2 * self._patience)
        chances = self.acceptance.chances(range(counts[-1]))
        gains = {n: self._gain(n, chances, one, len(wanting), batch, costs) for n in counts}
        count = max(
            counts,
            key=lambda n: (
                gains[n] * (1 + _HOPE / sqrt(1 + costs.num_known(batch + n * len(wanting))))
            ),
        )
        if costs.num_known(batch) < _LEAST_KNOWN and gains[count] < _SURE_GAIN:
            return None  # so that it is known what drafts are compared with
        if is_trial:
            count = max(n for n in counts if n <= max(count, _TRIAL_TOKENS))
        most = {slot: min(count, rooms[slot]) for slot in wanting}
        gain = float("inf") if is_trial else gains[count]
        if not is_trial and gain > _LEAST_GAIN:
            self._patience = _TRIED_AGAIN_AFTER
        return Plan(gain, _LEAST_GAIN, partial(self._draft, wanting, most, count))

    def forget(self, slot: int) -> None:
        """Drop the draft of a request that is through."""
        self._open.pop(slot, None)

    def _gain(
        self,
        count: int,
        chances: Sequence[float],
        one: float,
        num_drafting: int,
        batch: int,
        costs: StepCosts,
    ) -> float:
        verified = costs.seconds(batch + count * num_drafting) or one
        seconds = verified + (self.costs.seconds(count) or 0.0)
        tokens = batch + num_drafting * sum(chances[:count])
        return tokens / seconds * one / batch

    def _draft(
        self, histories: Mapping[int, Sequence[int]], most: Mapping[int, int], count: int
    ) -> Drafts:
        start = self.clock()
        found = self.drafter.draft(histories, most)
        self.costs.add(count, self.clock() - start)
        self._num_drafts += 1
        self._num_idle_steps = 0
        for slot in most:
            tokens = found.get(slot, ())
            if not len(tokens):  # it took its time all the same
                self.acceptance.add(0, is_hit=False)
            draft = Draft(tokens, range(len(tokens)))
            self._open[slot] = OpenDraft(draft, len(histories[slot]))
        return {slot: tokens for slot, tokens in found.items() if len(tokens)}
