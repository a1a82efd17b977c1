"""No prefetch."""

from tandem.policy.prediction.policy import Forecast
from tandem.policy.prefetch.policy import PrefetchTerms


class Nothing:
    """Copies nothing ahead."""

    is_staged = False

    def __init__(self, *, count: int = 0) -> None:
        """Ignore `count`."""

    def choose(self, forecast: Forecast, terms: PrefetchTerms) -> list[int]:
        """Return nothing."""
        return []

    def replaces(self, forecast: Forecast, terms: PrefetchTerms, expert: int, victim: int) -> bool:
        """Leave the cache alone."""
        return False
