"""Drafts that cost nothing: all are made and judged, and the likeliest are verified."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from tandem.policy.speculation.acceptance import Acceptance, OpenDraft
from tandem.policy.speculation.drafter import Draft, Drafter, MakeDrafter
from tandem.policy.speculation.plans import Drafts, NextStep, Plan
from tandem.policy.speculation.step_costs import StepCosts

# Tokens of a step that verifies drafts. Each size costs one slow step, in which it is recorded.
_SIZES = (2, 4, 8, 16)
# A smaller gain is noise, or not worth recording a step of a new size.
_LEAST_GAIN = 1.1
# Net cost that drafts may have for a request, in decode steps without drafts: at its beginning, and
# per token. So no answer takes much longer than without drafts.
_FIRST_ALLOWANCE, _ALLOWANCE_PER_TOKEN = 0.5, 0.01


@dataclass(slots=True)
class _Request:
    """A request's drafter, its latest draft, and its remaining allowance for drafts."""

    drafter: Drafter
    open: OpenDraft = field(default_factory=OpenDraft)
    allowance: float = _FIRST_ALLOWANCE
    length: int = 0
    """The length of the sequence, in tokens, when the last step was planned."""
    price: float | None = None
    """The cost of the sequence's drafts in the last step, in decode steps; None: it had no
    drafts."""

    def settle(self, length: int) -> None:
        """Update the allowance by the tokens since the last plan: each right guess saved a step."""
        if self.price is not None:
            self.allowance += length - self.length - 1 - self.price
        if self.length:
            self.allowance += _ALLOWANCE_PER_TOKEN * (length - self.length)
        self.length, self.price = length, None


class _Chosen(NamedTuple):
    """The drafted tokens that a step of one size would verify; empty if they do not fill it."""

    gain: float = 0.0
    """Expected tokens per second, relative to a step without drafts."""
    price: float = 0.0
    """The cost of each drafted token, in decode steps of one request."""
    counts: Mapping[int, int] = {}
    """The number of drafted tokens by slot."""


@dataclass(slots=True)
class FreeDrafts:
    """The drafting method whose drafters, one per sequence, cost nothing."""

    make_drafter: MakeDrafter
    acceptance: Acceptance = field(default_factory=Acceptance)
    _requests: dict[int, _Request] = field(default_factory=dict)

    def plan(self, step: NextStep) -> Plan | None:
        """Return the fastest plan; None if there are too few drafted tokens for any step size."""
        histories, rooms, batch, costs = step
        drafts = {slot: self._drafted(slot, tokens) for slot, tokens in histories.items()}
        chances = {
            slot: self.acceptance.chances(draft.evidence)[: rooms[slot]]
            for slot, draft in drafts.items()
        }
        options = [self._chosen(size, chances, batch, costs) for size in _SIZES]
        chosen = max(options, key=lambda option: option.gain)

        def take() -> Drafts:
            for slot, count in chosen.counts.items():
                self._requests[slot].price = count * chosen.price
            return {slot: drafts[slot].tokens[:n] for slot, n in chosen.counts.items()}

        return Plan(chosen.gain, _LEAST_GAIN, take) if chosen.counts else None

    def forget(self, slot: int) -> None:
        """Drop the drafter of a finished request."""
        if slot in self._requests:
            self._requests.pop(slot).drafter.end()

    def _drafted(self, slot: int, tokens: Sequence[int]) -> Draft:
        """Judge a request's last draft by the new tokens; return the next draft."""
        if slot not in self._requests:
            self._requests[slot] = _Request(self.make_drafter())
        request = self._requests[slot]
        request.settle(len(tokens))
        request.open.judge(tokens, self.acceptance)
        draft = request.drafter.draft(tokens)
        if not request.open.is_open:
            request.open = OpenDraft(draft, len(tokens))
        return draft

    def _chosen(
        self, size: int, chances: Mapping[int, Sequence[float]], batch: int, costs: StepCosts
    ) -> _Chosen:
        """Return the likeliest drafted tokens that fill a step of `size` tokens.

        Returns an empty `_Chosen` if the requests' allowances leave too few tokens, if the step has
        no room for drafts, or if its time is unknown.
        """
        one, seconds, num_drafted = costs.seconds(batch), costs.seconds(size), size - batch
        if one is None or seconds is None or num_drafted <= 0:
            return _Chosen()
        price = max(0.0, batch * (seconds / one - 1) / num_drafted)
        # Chances fall along a draft, so that its first tokens come first.
        likeliest = sorted(
            (
                (chance, slot)
                for slot, row in chances.items()
                for place, chance in enumerate(row)
                if (place + 1) * price <= self._requests[slot].allowance
            ),
            reverse=True,
        )[:num_drafted]
        if len(likeliest) < num_drafted:
            return _Chosen()
        tokens = batch + sum(chance for chance, _ in likeliest)
        counts = Counter(slot for _, slot in likeliest)
        return _Chosen(tokens / seconds * one / batch, price, counts)
