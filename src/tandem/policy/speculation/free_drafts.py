"""Drafts that cost nothing to make: all are made and judged, and the likeliest are verified."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from tandem.policy.speculation.acceptance import Acceptance, OpenDraft
from tandem.policy.speculation.drafter import Draft, Drafter, MakeDrafter
from tandem.policy.speculation.plans import Drafts, Plan
from tandem.policy.speculation.step_costs import StepCosts

# Tokens of a step that verifies: each size is recorded once, which takes a slow step.
_SIZES = (2, 4, 8, 16)
# A gain that is smaller is noise, or a step of a new size that is recorded for nothing.
_LEAST_GAIN = 1.1


@dataclass(slots=True)
class FreeDrafts:
    """A drafter for each sequence."""

    make_drafter: MakeDrafter
    acceptance: Acceptance = field(default_factory=Acceptance)
    _drafters: dict[int, tuple[Drafter, OpenDraft]] = field(default_factory=dict)

    def plan(
        self,
        histories: Mapping[int, Sequence[int]],
        rooms: Mapping[int, int],
        batch: int,
        costs: StepCosts,
    ) -> Plan | None:
        """Return the drafts that make the most tokens a second, if some make more than none."""
        drafts = {slot: self._drafted(slot, tokens) for slot, tokens in histories.items()}
        chances = [
            (chance, slot)
            for slot, draft in drafts.items()
            for chance in self.acceptance.chances(draft.evidence)[: rooms[slot]]
        ]
        chances.sort(reverse=True)  # chances fall along a draft, so that its first tokens go first
        gain, count = _best(batch, [chance for chance, _ in chances], costs)

        def likeliest() -> Drafts:
            taken = dict.fromkeys(histories, 0)
            for _, slot in chances[:count]:
                taken[slot] += 1
            return {slot: drafts[slot].tokens[:n] for slot, n in taken.items() if n}

        return Plan(gain, _LEAST_GAIN, likeliest) if count else None

    def forget(self, slot: int) -> None:
        """Drop the drafter of a request that is through."""
        if slot in self._drafters:
            self._drafters.pop(slot)[0].end()

    def _drafted(self, slot: int, tokens: Sequence[int]) -> Draft:
        """Judge a request's last draft by what has come; return one that follows."""
        if slot not in self._drafters:
            self._drafters[slot] = self.make_drafter(), OpenDraft()
        drafter, last = self._drafters[slot]
        last.judge(tokens, self.acceptance)
        draft = drafter.draft(tokens)
        if not last.is_open:
            self._drafters[slot] = drafter, OpenDraft(draft, len(tokens))
        return draft


def _best(batch: int, chances: Sequence[float], costs: StepCosts) -> tuple[float, int]:
    """Return the gain of the best number of drafted tokens, likeliest first, and the number."""
    one, best = costs.seconds(batch), (0.0, 0)
    for size in _SIZES:
        seconds, num_drafted = costs.seconds(size), size - batch
        if one is not None and seconds is not None and 0 < num_drafted <= len(chances):
            tokens = batch + sum(chances[:num_drafted])
            best = max(best, (tokens / seconds * one / batch, num_drafted))
    return best
