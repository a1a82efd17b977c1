"""Prefetches in long prompts, which use nearly every expert, so that no prediction is needed.

While a layer's experts and the next layer's attention are computed, the link would idle until the
next layer's router has run. So absent experts of the next layer are copied into staging slots, as
many as the link can carry, the most valuable first. Short prompts use predictions.
"""

import math
from collections.abc import Container

from tandem.policy.decider import Decider
from tandem.policy.link_queue import LinkQueue
from tandem.policy.plan import Copy, Geometry
from tandem.policy.residency import NOWHERE, Residency

# If experts get this many tokens on average, nearly all experts of a layer get some. Recorded
# prompts of 64 tokens on DeepSeek-V2-Lite, six per expert on average, use 58 to 63 of 64 experts.
_LEAST_TOKENS = 8


class PromptCopies:
    """Prefetches experts for the layers of a long prompt."""

    def __init__(
        self, geometry: Geometry, residency: Residency, link: LinkQueue, decider: Decider
    ) -> None:
        """Store a planner's components; without staging slots, nothing is prefetched."""
        self._geometry, self._residency = geometry, residency
        self._link, self._decider = link, decider
        self.is_on = False

    def begin_step(self, num_tokens: int, *, is_prefill: bool) -> None:
        """Begin a step and set `is_on`.

        That is True in the prefill of a long prompt, if there are staging slots.
        """
        geometry, residency = self._geometry, self._residency
        is_long = num_tokens * geometry.top_k >= _LEAST_TOKENS * geometry.num_experts
        self.is_on = is_prefill and is_long and residency.capacity[residency.staging] > 0

    def copies(
        self, layer: int, in_use: Container[int], now: float, next_plan: float
    ) -> tuple[Copy, ...]:
        """Queue and return prefetches for a layer that will be planned at `next_plan`.

        Before that, staged experts of earlier layers leave their slots, unless they are `in_use`.
        """
        residency, link = self._residency, self._link
        residency.release_passed(layer, in_use)
        room = len(residency.free[residency.staging])
        if link.copy_seconds:
            idle = next_plan - max(link.free_at, now)
            room = min(room, math.ceil(idle / link.copy_seconds))
        if room <= 0:
            return ()
        copies = []
        for key in self._decider.most_valued(layer, room):
            slot = residency.insert(key, residency.staging)
            link.issue(key, now)
            copies.append(residency.copy_of(key, slot, NOWHERE))
        return tuple(copies)
