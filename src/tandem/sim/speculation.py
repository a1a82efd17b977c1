"""Decode steps that verify drafted tokens, on a trace's routing.

Accepted tokens route as in the trace. A rejected token routes as it does elsewhere in the trace, or
as a random token of the trace if the trace does not contain it.
"""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import mul

import numpy as np

from tandem.core.errors import ConfigError
from tandem.policy.speculation.drafter import MOST_DRAFTED, SureDraft
from tandem.policy.speculation.free_drafts import FreeDrafts
from tandem.policy.speculation.paid_drafts import PaidDrafts
from tandem.policy.speculation.plans import Drafting, Drafts, NextStep, best_plan
from tandem.policy.speculation.prompt_lookup import PromptLookup
from tandem.policy.speculation.step_costs import TOUCHED, StepCosts
from tandem.policy.speculation.step_shape import StepShape
from tandem.sim.steps import Ints
from tandem.sim.timeline import Timeline
from tandem.trace import RoutingTrace

AUTO = "auto"
# Sample size of the beta distribution from which a layer's chances are drawn: many are near 0 or 1.
_SPREAD = 1.5


@dataclass(frozen=True, slots=True)
class SpeculationChoice:
    """Which drafter a simulation has, and how many drafted tokens each step verifies."""

    acceptance: float | None
    """How often each token of an MTP layer is right if all tokens before it are; None: prompt
    look-up."""
    is_sure: bool
    """Whether the MTP layer reports the probability of each token, which then varies."""
    length: int | None
    """Drafted tokens of each sequence that a step verifies, if that many exist; None: chosen by
    cost."""

    @classmethod
    def parsed(cls, drafter: str, length: str) -> "SpeculationChoice":
        """Parse a drafter and a length.

        The drafter is `n-gram`, `mtp=ACCEPTANCE` or `sure-mtp=ACCEPTANCE`, the length `auto` or a
        number. Raises `ConfigError` for other texts.
        """
        name, _, share = drafter.partition("=")
        if name not in ("n-gram", "mtp", "sure-mtp") or (name == "n-gram" and share):
            raise ConfigError(
                f"--speculate is {drafter!r}; expected n-gram, mtp=ACCEPTANCE or "
                "sure-mtp=ACCEPTANCE"
            )
        acceptance = None if name == "n-gram" else _number("mtp=ACCEPTANCE", share, float, 1.0)
        count = None if length == AUTO else _number("--length", length, int, MOST_DRAFTED)
        return cls(acceptance, name == "sure-mtp", None if count is None else int(count))


def _number(what: str, text: str, kind: Callable[[str], float], most: float) -> float:
    try:
        number = kind(text)
    except ValueError:
        number = -1.0
    if not 0 <= number <= most:
        raise ConfigError(f"{what} got {text!r}; expected a number from 0 to {most}")
    return number


class TraceSpeculation:
    """Chooses the tokens of a replay's decode steps, with drafts to verify: a `Decoding`."""

    def __init__(
        self,
        trace: RoutingTrace,
        choice: SpeculationChoice,
        clock: Timeline,
        layer_seconds: StepShape,
    ) -> None:
        """Draft as `choice` says; `layer_seconds` is a layer's time by the number of tokens.

        To draft one token, an MTP layer takes a layer's time for one token. Raises `ConfigError`
        for prompt look-up on a trace without token ids.
        """
        if trace.token_ids is None and choice.acceptance is None:
            raise ConfigError(
                "the trace has no token ids; expected some for --speculate n-gram "
                "(tandem trace records them)"
            )
        ids = trace.token_ids
        self._ids: list[int] = [*range(trace.num_tokens)] if ids is None else ids.tolist()
        self._starts = trace.seq_offsets
        self._places = dict(zip(self._ids, range(trace.num_tokens), strict=True))
        self._length, self._clock, self._costs = (
            choice.length,
            clock,
            StepCosts(layer_seconds, TOUCHED),
        )
        self._chance = random.Random(0)
        self._begin, self._num_tokens = 0.0, 0
        self._scripted = None
        self._way: Drafting = FreeDrafts(PromptLookup)
        if choice.acceptance is not None:
            self._scripted = _ScriptedMtp(self._ids, choice, clock, layer_seconds)
            self._way = PaidDrafts(self._scripted, lambda: clock.now)
        self.drafted = self.accepted = 0

    def next(self, running: Sequence[tuple[int, int]]) -> tuple[Ints, list[int]]:
        """Return a step's tokens and each sequence's advance; see `Decoding.next`."""
        histories = {end: self._history(at) for at, end in running}
        rooms = {end: end - at - 1 for at, end in running}
        drafts = self._drafts(histories, rooms, len(running))
        tokens, moved = [], []
        for at, end in running:
            draft = drafts.get(end, ())
            count = next(
                (i for i, token in enumerate(draft) if token != self._ids[at + 1 + i]), len(draft)
            )
            tokens += [*range(at, at + 1 + count), *map(self._elsewhere, draft[count:])]
            moved.append(1 + count)
            self.drafted += len(draft)
            self.accepted += count
        self._begin, self._num_tokens = self._clock.now, len(tokens)
        return np.array(tokens), moved

    def done(self) -> None:
        """Record the step's duration, from which later lengths are chosen."""
        self._costs.add(self._num_tokens, self._clock.now - self._begin)

    def _history(self, at: int) -> list[int]:
        start = int(self._starts[np.searchsorted(self._starts, at, side="right") - 1])
        return self._ids[start : at + 1]

    def _drafts(
        self, histories: Mapping[int, Sequence[int]], rooms: Mapping[int, int], batch: int
    ) -> Drafts:
        if self._scripted is not None:
            self._scripted.next_places = {end: end - rooms[end] for end in histories}
        if self._length is None:
            plan = best_plan([self._way], NextStep(histories, rooms, batch, self._costs))
            return plan.drafts() if plan is not None and plan.is_worth else {}
        most = {end: min(self._length, room) for end, room in rooms.items()}
        if self._scripted is not None:
            found = self._scripted.draft(histories, most, 0.0) if any(most.values()) else {}
            return {end: draft.tokens for end, draft in found.items()}
        return {
            end: PromptLookup().draft(history).tokens[: most[end]]
            for end, history in histories.items()
        }

    def _elsewhere(self, token: int) -> int:
        """Return an index in the trace, whose routing a rejected token gets.

        It is the index of an equal token if the trace has one, else a random index.
        """
        return self._places.get(token, self._chance.randrange(len(self._ids)))


class _ScriptedMtp:
    """Drafts tokens that are right with some probability; each costs a layer's time for one token.

    Which tokens are right is drawn once, so that lengths are compared on the same tokens. With
    `is_sure` the probability differs by token, as with real MTP layers, and is reported.
    """

    def __init__(
        self,
        ids: Sequence[int],
        choice: SpeculationChoice,
        clock: Timeline,
        layer_seconds: StepShape,
    ) -> None:
        chance, share = np.random.default_rng(1), choice.acceptance or 0.0
        chances = np.full(len(ids), share)
        self._chances: list[float] = []
        if choice.is_sure and 0 < share < 1:
            chances = chance.beta(_SPREAD * share, _SPREAD * (1 - share), len(ids))
            self._chances = chances.tolist()
        known = chance.random(len(ids)) < chances
        others = chance.permutation(ids)
        others[others == ids] = -1
        self._drafts: list[int] = np.where(known, ids, others).tolist()
        self._clock, self._layer_seconds = clock, layer_seconds
        self.next_places: dict[int, int] = {}
        """By sequence: the index of its next token in the trace."""

    def draft(
        self, histories: Mapping[int, Sequence[int]], most: Mapping[int, int], least: float
    ) -> dict[int, SureDraft]:
        """Return drafts by sequence, each of at most `most` tokens; see `PaidDrafter`."""
        drafts = {}
        for end, count in most.items():
            first = self.next_places[end]
            chances = self._chances[first : first + count]
            together = list(accumulate(chances, mul))
            length = next((i for i, x in enumerate(together, 1) if x < least), count)
            tokens = self._drafts[first : first + length]
            drafts[end] = SureDraft(tokens, chances[: len(tokens)])
        longest = max((len(draft.tokens) for draft in drafts.values()), default=0)
        self._clock.now += self._layer_seconds(1) * longest
        return drafts
