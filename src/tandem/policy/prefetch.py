"""Chooses which predicted experts are prefetched: one protocol, and its implementations by name.

Tandem's own choice uses only idle link time, so that a prefetch never delays a needed copy. No
slots are set aside: a prefetch takes the slot of a resident that is less likely to be used. Nothing
is copied before chances of a worthwhile copy have recurred (`Recurrence`).
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from tandem.core.registry import Registry
from tandem.policy.prediction.policy import Forecast

# 30 copies in 600 tokens of 26 layers: they gain 3 ms, and a single change costs 0.9 ms.
LAYERS_PER_CHANCE = 512
FULL = 16 * LAYERS_PER_CHANCE
ENOUGH = 8 * LAYERS_PER_CHANCE


class PrefetchTerms(NamedTuple):
    """What a prefetch for the coming layer costs and saves now, and how many are possible."""

    slots: Sequence[int]  # by expert of the coming layer; negative: absent
    room: int  # slots that copies may take
    idle_copies: int  # copies that the link can carry before the coming layer needs it
    link_seconds: float  # time of one copy
    price_seconds: float  # the time that one copy costs CPU and GPU
    gain_seconds: float  # what one more resident expert saves if it is used


class PrefetchChoice(Protocol):
    """Chooses experts to prefetch; must keep no state."""

    is_staged: bool  # whether prefetches wait in slots of their own, not in the cache's
    count: int  # limit of prefetches for one layer

    def choose(self, forecast: Forecast, terms: PrefetchTerms) -> list[int]:
        """Return absent experts to copy, at most `terms.room`, in copy order."""

    def replaces(self, forecast: Forecast, terms: PrefetchTerms, expert: int, victim: int) -> bool:
        """Tell whether `expert` may replace the resident `victim`; not called if `is_staged`."""
        return False


class Pays(PrefetchChoice):
    """Prefetches an absent expert if its chance of use times the saving is above a copy's price."""

    is_staged = False

    def __init__(self, *, count: int) -> None:
        """Set the limit of prefetches for one layer."""
        self.count = count

    def choose(self, forecast: Forecast, terms: PrefetchTerms) -> list[int]:
        """Return the experts worth a copy, best first."""
        limit = min(self.count, terms.room, terms.idle_copies)
        if limit <= 0 or terms.gain_seconds <= 0.0:
            return []
        least = terms.price_seconds / terms.gain_seconds
        floor = forecast.least_score(least)
        slots = terms.slots
        likely = [
            (-score, expert)
            for expert, score in enumerate(forecast.scores)
            if score >= floor and slots[expert] < 0
        ]
        likely.sort()
        return [expert for score, expert in likely[:limit] if forecast.chance(-score) > least]

    def replaces(self, forecast: Forecast, terms: PrefetchTerms, expert: int, victim: int) -> bool:
        """Tell whether the expert's higher chance of use saves more than a copy's price."""
        scores = forecast.scores
        more = forecast.chance(scores[expert]) - forecast.chance(scores[victim])
        return more * terms.gain_seconds > terms.price_seconds


class NoPrefetch(PrefetchChoice):
    """Prefetches nothing."""

    is_staged = False
    count = 0

    def __init__(self, *, count: int = 0) -> None:
        """Ignore `count`."""

    def choose(self, forecast: Forecast, terms: PrefetchTerms) -> list[int]:
        """Return no experts."""
        return []


class Recurrence:
    """Tells recurring chances of a worthwhile copy from isolated chances, with a leaky bucket.

    A prefetch changes the cache's content from then on, which makes a run of 5 s faster or slower
    by up to 0.9 ms; the copy itself gains about 0.1 ms (docs/policies.md, "What did not work"). So
    few copies are a gamble and many are a gain.
    """

    def __init__(self) -> None:
        """Start empty."""
        self.level = 0
        """The current level of the bucket."""

    def layer_passed(self) -> None:
        """Lower the level by one: a layer has passed."""
        if self.level:
            self.level -= 1

    def note_chance(self) -> bool:
        """Count a chance; return whether recent chances are frequent enough to copy experts."""
        self.level = min(self.level + LAYERS_PER_CHANCE, FULL)
        return self.level >= ENOUGH


PREFETCHES: Registry[PrefetchChoice] = Registry("prefetch choice")
PREFETCHES.register("pays")(Pays)
PREFETCHES.register("none")(NoPrefetch)
