"""Tandem's choice: copy ahead only where probability times saving is above the copy's price.

Only idle link time is used, so that a copy ahead never stands before one that is needed, and no
slots are set aside: a copy ahead takes the slot of a resident that is less likely to be used.
"""

from tandem.policy.prediction.policy import Forecast
from tandem.policy.prefetch.policy import PrefetchTerms


class Pays:
    """Copies at most `count` absent experts whose expected saving is above their price."""

    is_staged = False

    def __init__(self, *, count: int) -> None:
        """Copy at most `count` per layer."""
        self._count = count

    def choose(self, forecast: Forecast, terms: PrefetchTerms) -> list[int]:
        """Return the experts that pay, best first."""
        limit = min(self._count, terms.room, terms.idle_copies)
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
        """Compare both chances of being used."""
        scores = forecast.scores
        more = forecast.chance(scores[expert]) - forecast.chance(scores[victim])
        return more * terms.gain_seconds > terms.price_seconds
