"""Which drafted tokens a decode step verifies: as many as pay, by measured costs.

A step of more tokens takes longer, as it touches more experts; its drafted tokens come true with a
chance. `Speculation.choose` takes the number that brings the most tokens a second, which is often
none. The answer is the same whatever it takes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from tandem.core.registry import Registry
from tandem.generate.speculation.acceptance import Acceptance
from tandem.generate.speculation.drafter import Draft, Drafter, MakeDrafter
from tandem.generate.speculation.prompt_lookup import PromptLookup
from tandem.generate.speculation.step_costs import StepCosts

DRAFTERS: Registry[Drafter] = Registry("drafter")
DRAFTERS.register("lookup")(PromptLookup)
SPECULATE = ("auto", *DRAFTERS, "none")

# Tokens of a step that verifies: each size is recorded once, which takes a slow step.
_SIZES = (2, 4, 8, 16)
# A gain that is smaller is noise, or a step of a new size that is recorded for nothing.
_LEAST_GAIN = 1.1


@dataclass(slots=True)
class _Sequence:
    """The drafter of one sequence, and the draft that waits to be judged."""

    drafter: Drafter
    draft: Draft = field(default_factory=lambda: Draft((), ()))
    length: int = 0
    """Tokens of the sequence that the draft followed."""
    num_judged: int = 0


@dataclass(slots=True)
class Speculation:
    """Drafts for the requests of one scheduler."""

    make_drafter: MakeDrafter
    acceptance: Acceptance = field(default_factory=Acceptance)
    costs: StepCosts = field(default_factory=StepCosts)
    _sequences: dict[int, _Sequence] = field(default_factory=dict)

    def choose(
        self, histories: Mapping[int, Sequence[int]], rooms: Mapping[int, int], batch: int
    ) -> dict[int, Sequence[int]]:
        """Return the drafted tokens that the next step verifies, by slot; often none.

        `histories` are all tokens of each request that may have some, `rooms` how many; `batch`
        requests decode.
        """
        drafts = {number: self._drafted(number, tokens) for number, tokens in histories.items()}
        chances = [
            (chance, number)
            for number, draft in drafts.items()
            for chance in self.acceptance.chances(draft)[: rooms[number]]
        ]
        chances.sort(reverse=True)  # chances fall along a draft, so that its first tokens go first
        taken = dict.fromkeys(histories, 0)
        for _, number in chances[: self._num_drafted(batch, [c for c, _ in chances])]:
            taken[number] += 1
        return {n: drafts[n].tokens[:count] for n, count in taken.items() if count}

    def forget(self, slot: int) -> None:
        """Drop the drafter of a request that is through."""
        self._sequences.pop(slot, None)

    def _num_drafted(self, batch: int, chances: Sequence[float]) -> int:
        """Return how many tokens, likeliest first, make the most tokens a second."""
        one = self.costs.seconds(batch)
        if one is None:
            return 0
        best, num_best = _LEAST_GAIN * batch / one, 0
        for size in _SIZES:
            seconds, num_drafted = self.costs.seconds(size), size - batch
            if seconds is None or not 0 < num_drafted <= len(chances):
                continue
            rate = (batch + sum(chances[:num_drafted])) / seconds
            if rate > best:
                best, num_best = rate, num_drafted
        return num_best

    def _drafted(self, number: int, tokens: Sequence[int]) -> Draft:
        """Judge a request's last draft by what has come; return one that follows."""
        one = self._sequences.setdefault(number, _Sequence(self.make_drafter()))
        is_open = self._judge(one, tokens)
        draft = one.drafter.draft(tokens)
        if not is_open:
            one.draft, one.length, one.num_judged = draft, len(tokens), 0
        return draft

    def _judge(self, one: _Sequence, tokens: Sequence[int]) -> bool:
        """Compare a draft with the tokens that came; tell whether more of it is to come."""
        draft = one.draft
        while one.num_judged < min(len(draft.tokens), len(tokens) - one.length):
            place = one.num_judged
            is_hit = draft.tokens[place] == tokens[one.length + place]
            self.acceptance.add(draft.evidence[place], is_hit=is_hit)
            if not is_hit:
                return False
            one.num_judged += 1
        return one.num_judged < len(draft.tokens)


def new_speculation(name: str) -> Speculation | None:
    """Return the speculation of that name: "none", "auto" or a drafter; `ConfigError` else."""
    if name == "none":
        return None
    return Speculation(DRAFTERS.factory("lookup" if name == "auto" else name))
