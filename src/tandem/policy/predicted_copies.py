"""Copies ahead of experts that a layer to come is expected to use.

In plans they take idle time of the link and slots of the cache. In a step that is one graph no
expert can leave for them, as the device has looked up who is there: they go into clear slots of
their own (the staging set), ahead of the copies of this layer's misses for later steps. A miss that
is admitted may save time often; one that the next layer is about to have saves it now.

What layers that are routed by token will use is no guess, and is copied by `KnownCopies`.
"""

from collections.abc import Iterable, Sequence

from tandem.policy.admission import Admission
from tandem.policy.cost import CostTable
from tandem.policy.known_copies import KnownCopies
from tandem.policy.link_queue import LinkQueue
from tandem.policy.plan import Copy, Geometry
from tandem.policy.prediction.policy import Prediction
from tandem.policy.prefetch import PrefetchChoice, PrefetchTerms, Recurrence
from tandem.policy.residency import NOWHERE, Residency


class PredictedCopies:
    """Asks a prediction, and chooses what is copied by it."""

    def __init__(
        self,
        geometry: Geometry,
        costs: CostTable,
        residency: Residency,
        link: LinkQueue,
        admission: Admission,
        prediction: Prediction,
        prefetch: PrefetchChoice,
        copy_price_seconds: float,
    ) -> None:
        """Work with a planner's parts; one copy costs CPU and GPU `copy_price_seconds`."""
        self._geometry, self._costs, self._residency, self._link = geometry, costs, residency, link
        self._admission, self._prediction, self._prefetch = admission, prediction, prefetch
        self.copy_price_seconds = copy_price_seconds
        self.is_staged, self.most = prefetch.is_staged, prefetch.count
        self.chances = Recurrence()
        self.known = KnownCopies(geometry, costs, residency, link, admission, copy_price_seconds)

    def planned(
        self, layer: int, in_use: frozenset[int], now: float, next_plan: float
    ) -> tuple[Copy, ...]:
        """Return copies for a layer that is planned at `next_plan`, and queue them on the link."""
        residency, link, experts = self._residency, self._link, self._geometry.num_experts
        first, set_id = layer * experts, residency.set_of(layer)
        self.chances.layer_passed()
        idle_copies = self._copies_in_time(layer, next_plan - max(link.free_at, now))
        if idle_copies <= 0 and not self.is_staged:
            return ()
        forecast = self._prediction.predict(layer)
        if forecast is None:
            return ()
        if self.is_staged:
            residency.release_passed(layer, in_use)
            set_id = residency.staging
        room = len(residency.free[set_id]) if self.is_staged else residency.capacity[set_id]
        terms = self._terms(first, room, idle_copies)
        entering = [first + expert for expert in self._prefetch.choose(forecast, terms)]
        copies = []
        for key, victim in self._admission.pairs(set_id, entering, in_use, asks=False):
            if victim != NOWHERE:
                if victim // experts != layer:
                    continue  # the forecast is about another layer
                if not self._prefetch.replaces(forecast, terms, key - first, victim - first):
                    continue
            if not self.is_staged and not self.chances.note_chance():
                continue
            if victim != NOWHERE:
                residency.remove(victim)
            slot = residency.insert(key, set_id)
            link.issue(key, now)
            copies.append(residency.copy_of(key, slot, victim))
        return tuple(copies)

    def in_graph(
        self,
        layer: int,
        num_fetches: int,
        now: float,
        next_plan: float,
        *,
        predicts: bool,
    ) -> tuple[Copy, ...]:
        """Give clear slots to experts of a layer that is published at `next_plan`.

        And of those behind it that are known, each as much later than the one before as this is
        than `now`. As many as come until then, behind so many fetches. The caller has them issued.
        """
        found: list[Copy] = []
        ready = max(self._link.free_at, now + self._costs.copy_wake)
        ready += num_fetches * self._link.copy_seconds
        for known in self.known.since(layer):
            begin = ready + len(found) * self._link.copy_seconds
            published = next_plan + (known.layer - layer) * (next_plan - now)
            found += self.known.in_graph(known, begin, published)
        if predicts and layer not in self.known:
            begin = ready + len(found) * self._link.copy_seconds
            found += self._of_predicted(layer, begin, next_plan)
        return tuple(found)

    def issue(self, ahead: Iterable[Copy], now: float) -> None:
        """Queue the copies ahead of a step in one graph on the link."""
        for copy in ahead:
            self._link.issue(
                self._geometry.key(copy.layer, copy.expert), now + self._costs.copy_wake
            )

    def _of_predicted(self, layer: int, ready: float, next_plan: float) -> tuple[Copy, ...]:
        residency, link = self._residency, self._link
        first, room = layer * self._geometry.num_experts, len(residency.free[residency.staging])
        idle = self._link.whole_copies(next_plan - ready)
        if layer == self._geometry.num_layers or room == 0 or idle <= 0:
            return ()
        forecast = self._prediction.predict(layer)
        if forecast is None:
            return ()
        chosen: Sequence[int] = self._prefetch.choose(forecast, self._terms(first, room, idle))
        keys = [first + expert for expert in chosen]
        return tuple(
            residency.copy_of(key, residency.insert(key, residency.staging), NOWHERE)
            for key in keys
            if key not in link.pending  # it has been fetched for one use, late
        )

    def _copies_in_time(self, layer: int, idle_seconds: float) -> int:
        """Return how many copies ahead of a layer the link can carry while it is idle.

        Where the layer's router has been asked, a copy may also end later than the layer begins, if
        the CPU would need longer still: what is named would otherwise be fetched then.
        """
        copy_seconds, count = self._link.copy_seconds, self._link.whole_copies(idle_seconds)
        if count or self.is_staged or idle_seconds <= 0.0:
            return count
        is_sooner = copy_seconds - idle_seconds < self._costs.cpu[1]
        return int(is_sooner and self._prediction.is_hinted(layer))

    def _terms(self, first: int, room: int, idle_copies: int) -> PrefetchTerms:
        """Return what copies ahead of the layer with this first key cost and bring."""
        slots = self._residency.slot_of[first : first + self._geometry.num_experts]
        gain, price = self._costs.cpu[1], self.copy_price_seconds
        return PrefetchTerms(slots, room, idle_copies, self._link.copy_seconds, price, gain)
