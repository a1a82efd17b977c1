"""A drafting method's plan for the next step: its expected speed, and how to get the drafts."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple, Protocol

from tandem.policy.speculation.step_costs import StepCosts

Drafts = dict[int, Sequence[int]]
"""Drafted tokens by slot."""


class NextStep(NamedTuple):
    """The decode step for which tokens are drafted."""

    histories: Mapping[int, Sequence[int]]
    """By slot: all tokens of each request that may have drafts."""
    rooms: Mapping[int, int]
    """By slot: the most drafted tokens that each request may have."""
    batch: int
    """The number of requests that decode."""
    costs: StepCosts


class Plan(NamedTuple):
    """Drafts that a step may verify: what they gain, and a function that returns them."""

    gain: float
    """Expected tokens per second, relative to a step without drafts."""
    least_gain: float
    """The plan is worth following if its gain is above this."""
    drafts: Callable[[], Drafts]
    """Makes and returns the drafts; `gain` already includes the time that this takes."""

    @property
    def is_worth(self) -> bool:
        """Whether to follow the plan."""
        return self.gain > self.least_gain


class Drafting(Protocol):
    """A drafting method for the requests of one scheduler."""

    def plan(self, step: NextStep) -> Plan | None:
        """Return the method's best plan for the next step; None if it has no plan.

        The plan may not pay: see `Plan.is_worth`.
        """

    def forget(self, slot: int) -> None:
        """Drop the state of a finished request."""


def best_plan(ways: Iterable[Drafting], step: NextStep) -> Plan | None:
    """Return the best plan that pays, else the best plan; None if no method has a plan."""
    plans = [way.plan(step) for way in ways]
    known = [plan for plan in plans if plan is not None]
    return max(known, key=lambda plan: (plan.is_worth, plan.gain), default=None)
