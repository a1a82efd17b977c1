"""Tests of free drafts: which are verified, and what wrong ones cost."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import pytest

from tandem.policy.speculation.drafter import Draft
from tandem.policy.speculation.free_drafts import FreeDrafts
from tandem.policy.speculation.plans import NextStep
from tandem.policy.speculation.step_costs import StepCosts

SECONDS = {1: 1.0, 2: 1.3, 3: 1.6, 4: 1.8, 8: 2.4, 16: 4.0}
ANSWER = 400

Guess = Callable[[int], int]


@dataclass
class Script:
    """Drafts by position: `guess(position)` is the expected token there."""

    guess: Guess

    def draft(self, tokens: Sequence[int]) -> Draft:
        places = range(len(tokens), len(tokens) + 7)
        return Draft([self.guess(place) for place in places], [0] * 7)

    def end(self) -> None:
        pass


def costs() -> StepCosts:
    known = StepCosts()
    for _ in range(40):
        for size, seconds in SECONDS.items():
            known.add(size, seconds)
    return known


def right(place: int) -> int:
    return place


def wrong(place: int) -> int:
    return -1


def seconds_of(way: FreeDrafts, guesses: Mapping[int, Guess]) -> float:
    """Return the seconds of answers 1, 2, 3 ... of some requests that share steps."""
    known, spent = costs(), 0.0
    at = dict.fromkeys(guesses, 1)
    while at:
        texts = {slot: range(length) for slot, length in at.items()}
        plan = way.plan(NextStep(texts, dict.fromkeys(at, 7), len(at), known))
        drafts = plan.drafts() if plan is not None and plan.is_worth else {}
        spent += known.seconds(len(at) + sum(map(len, drafts.values()))) or 0.0
        for slot in list(at):
            hits = [token == at[slot] + i for i, token in enumerate(drafts.get(slot, ()))]
            at[slot] += 1 + [*hits, False].index(False)
            if at[slot] > ANSWER:
                way.forget(slot)
                del at[slot]
    return spent


@pytest.mark.parametrize("learnt", [0, 1, 3])
def test_drafts_that_fail_cost_an_answer_next_to_nothing(learnt: int) -> None:
    """It holds however successful the answers before were."""
    turn = [right]
    way = FreeDrafts(lambda: Script(turn[0]))
    for _ in range(learnt):
        seconds_of(way, {0: right})
    turn[0] = wrong
    known = costs()
    without = ANSWER * (known.seconds(1) or 0.0)
    assert seconds_of(way, {0: wrong}) < 1.013 * without


def test_drafts_that_come_true_are_soon_as_long_as_they_get() -> None:
    way = FreeDrafts(lambda: Script(right))
    known = costs()
    longest = ANSWER / 8 * (known.seconds(8) or 0.0)
    assert seconds_of(way, {0: right}) < 1.1 * longest


def test_what_a_request_has_gained_another_does_not_lose() -> None:
    scripts = iter([right, wrong])
    way = FreeDrafts(lambda: Script(next(scripts)))
    known = costs()
    alone = ANSWER * (known.seconds(2) or 0.0)
    assert seconds_of(way, {0: right, 1: wrong}) < alone
