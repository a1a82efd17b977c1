"""Which of the predicted experts are copied ahead."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from tandem.policy.prediction.policy import Forecast


class PrefetchTerms(NamedTuple):
    """What a copy ahead costs and brings now."""

    slots: Sequence[int]  # by expert of the layer to come; negative: absent
    room: int  # slots that it may take
    idle_copies: int  # copies the link can carry before the layer to come needs it
    link_seconds: float  # one copy
    price_seconds: float  # the time that one copy costs CPU and GPU
    gain_seconds: float  # what one more resident expert saves if it is used


class PrefetchChoice(Protocol):
    """Chooses experts to copy ahead; keeps no state."""

    is_staged: bool  # copies ahead wait in slots of their own, else in the cache's

    def choose(self, forecast: Forecast, terms: PrefetchTerms) -> list[int]:
        """Return absent experts, at most `terms.room`, in copy order."""

    def replaces(self, forecast: Forecast, terms: PrefetchTerms, expert: int, victim: int) -> bool:
        """Tell whether an expert may take the slot of a resident of its layer, if not staged."""
