"""What a way of drafting offers for the next step: how fast it would be, and how to get it."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple, Protocol

from tandem.policy.speculation.step_costs import StepCosts

Drafts = dict[int, Sequence[int]]
"""Drafted tokens by slot."""


class Plan(NamedTuple):
    """Drafts for a step."""

    gain: float
    """Expected tokens a second over those of a step without drafts."""
    least_gain: float
    """Below it the plan is not worth a try."""
    drafts: Callable[[], Drafts]
    """Returns the drafts; may take the time that the gain accounts for."""


class Drafting(Protocol):
    """A way of drafting for the requests of one scheduler."""

    def plan(
        self,
        histories: Mapping[int, Sequence[int]],
        rooms: Mapping[int, int],
        batch: int,
        costs: StepCosts,
    ) -> Plan | None:
        """Return the best that there is for the next step, as of `best_drafts`."""

    def forget(self, slot: int) -> None:
        """Drop what is known of a request that is through."""


def best_drafts(
    ways: Iterable[Drafting],
    costs: StepCosts,
    histories: Mapping[int, Sequence[int]],
    rooms: Mapping[int, int],
    batch: int,
) -> Drafts:
    """Return the drafted tokens that the next step verifies, by slot; often none.

    `histories` are all tokens of each request that may have some, `rooms` how many; `batch`
    requests decode.
    """
    plans = [way.plan(histories, rooms, batch, costs) for way in ways]
    worth = [plan for plan in plans if plan is not None and plan.gain > plan.least_gain]
    best = max(worth, key=lambda plan: plan.gain, default=None)
    return {} if best is None else best.drafts()
