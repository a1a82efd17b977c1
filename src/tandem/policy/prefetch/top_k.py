"""DALI's choice: the k experts with the highest predicted workload; residents need no copy."""

from tandem.policy.prediction.policy import Forecast
from tandem.policy.prefetch.policy import PrefetchTerms


class TopK:
    """Copies whatever of the k best is absent, whether or not the link has time for it."""

    is_staged = True

    def __init__(self, *, count: int) -> None:
        """Look at the `count` best."""
        self._count = count

    def choose(self, forecast: Forecast, terms: PrefetchTerms) -> list[int]:
        """Return the absent ones among the k best."""
        scores = forecast.scores
        best = sorted(range(len(scores)), key=lambda expert: (-scores[expert], expert))
        absent = [
            e for e in best[: self._count] if terms.slots[e] < 0 and scores[e] > forecast.base
        ]
        return absent[: terms.room]

    def replaces(self, forecast: Forecast, terms: PrefetchTerms, expert: int, victim: int) -> bool:
        """Leave the cache alone."""
        return False
