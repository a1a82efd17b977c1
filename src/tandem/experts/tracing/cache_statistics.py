"""What the expert cache did in a run: a fold over the executor's events."""

import operator
from dataclasses import astuple, dataclass, field

from tandem.experts.tracing.events import LayerExecuted
from tandem.policy.plan import Copy


@dataclass(slots=True)
class LayerCounts:
    """The totals of one layer over all steps."""

    active: int = 0
    hits: int = 0
    """Active experts that were resident and ready when planned."""
    on_device: int = 0
    fetched: int = 0
    """Experts whose copies the layer waited for."""
    inserted: int = 0
    prefetched: int = 0
    evicted: int = 0
    device_waited_seconds: float = 0.0
    """The time that the device waits for the CPU, according to the plans."""
    cpu_waited_seconds: float = 0.0

    def __add__(self, other: "LayerCounts") -> "LayerCounts":
        """Return the totals of both objects, added field by field."""
        return LayerCounts(*map(operator.add, astuple(self), astuple(other)))


@dataclass(slots=True)
class CacheStatistics:
    """Sums up what the expert cache did, by layer; add it to a hybrid executor's listeners."""

    layers: dict[int, LayerCounts] = field(default_factory=dict)
    prefetch_issued: int = 0
    prefetch_useful: int = 0
    device_rows: int = 0
    rows: int = 0
    plan_seconds: float = 0.0
    calls: int = 0
    _ahead: set[tuple[int, int]] = field(default_factory=set)

    def __call__(self, event: LayerExecuted) -> None:
        """Add one layer's event to the totals; an event without a plan is ignored."""
        plan, load = event.plan, event.load
        if plan is None or load is None:
            return
        self.calls += 1
        self.plan_seconds += event.plan_seconds
        counts = self.layers.setdefault(event.layer, LayerCounts())
        counts.active += len(load.experts)
        counts.hits += plan.hits
        counts.on_device += len(load.experts) - len(plan.cpu)
        counts.fetched += len(plan.fetch)
        counts.inserted += len(plan.insert)
        counts.prefetched += len(plan.prefetch)
        copies = (*event.step_copies, *plan.fetch, *plan.insert, *plan.prefetch)
        counts.evicted += sum(copy.evicts is not None for copy in copies)
        difference = plan.gpu_seconds - plan.cpu_seconds
        if difference > 0:
            counts.cpu_waited_seconds += difference
        else:
            counts.device_waited_seconds -= difference
        on_cpu = set(plan.cpu)
        pairs = zip(load.experts, load.tokens, strict=True)
        self.rows += event.num_expert_rows
        self.device_rows += sum(tokens for expert, tokens in pairs if expert not in on_cpu)
        self._count_ahead(event)

    def _count_ahead(self, event: LayerExecuted) -> None:
        plan = event.plan
        assert plan is not None
        self._note_ahead(event.step_copies)
        if self._ahead:
            used = (*plan.gpu, *plan.arriving)
            self.prefetch_useful += sum((plan.layer, expert) in self._ahead for expert in used)
            self._ahead = {pair for pair in self._ahead if pair[0] != plan.layer}
        self._note_ahead(plan.prefetch)

    def _note_ahead(self, copies: tuple[Copy, ...]) -> None:
        self.prefetch_issued += len(copies)
        self._ahead.update((copy.layer, copy.expert) for copy in copies)

    @property
    def active(self) -> int:
        """The number of active experts, over all layers and steps."""
        return sum(counts.active for counts in self.layers.values())

    @property
    def hits(self) -> int:
        """The number of active experts that were resident and ready when planned."""
        return sum(counts.hits for counts in self.layers.values())

    @property
    def hit_rate(self) -> float:
        """Hits divided by active experts; 0 before the first event."""
        return self.hits / self.active if self.active else 0.0

    @property
    def copies(self) -> int:
        """The number of copies to the device: fetched, inserted and prefetched experts."""
        layers = self.layers.values()
        return sum(counts.fetched + counts.inserted for counts in layers) + self.prefetch_issued

    @property
    def device_share(self) -> float:
        """The share of routed tokens that the device computed."""
        return self.device_rows / self.rows if self.rows else 0.0
