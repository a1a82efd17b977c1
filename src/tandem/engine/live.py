"""Snapshots for the server's page: where experts are, their uses, how busy CPU, GPU and link are.

Snapshots sum up the executor's events and the batch's steps. Both are observed only while a page is
open.
"""

import base64
import json
import time
from collections import deque

from tandem.experts.execution.executor import Executor
from tandem.experts.tracing.cache_statistics import CacheStatistics
from tandem.experts.tracing.events import LayerExecuted
from tandem.policy.residency import COPYING, READY

_PERIOD_SECONDS = 0.2
_STEPS = 48
# Uses are counted in one byte.
_MOST_USES = 255
ON_HOST, ARRIVING, ON_DEVICE = 0, 1, 2


class LiveSnapshots:
    """Makes snapshots: where experts are now, and what has happened since the last snapshot."""

    def __init__(self, executor: Executor) -> None:
        """Prepare snapshots of an executor's model; `watch` starts them."""
        self._executor = executor
        self._num_layers = len(executor.store)
        self._num_experts = max((x.arrivals.num_experts for x in executor.store), default=0)
        self._is_watched = False
        self._last_sent = 0.0
        self._clear()

    def _clear(self) -> None:
        cells = self._num_layers * self._num_experts
        self._by_host, self._by_device = bytearray(cells), bytearray(cells)
        self._steps: deque[dict[str, float]] = deque(maxlen=_STEPS)
        self._cache = CacheStatistics()
        self._tokens = 0
        self._since = time.perf_counter()

    def watch(self, is_on: bool) -> None:
        """Start or stop listening to the executor's events."""
        if is_on == self._is_watched:
            return
        self._is_watched = is_on
        listeners = self._executor.listeners
        if is_on:
            self._clear()
            listeners.append(self)
            self._count_watchers(1)
            self._busy_before = self._busy()
        else:
            listeners.remove(self)
            self._count_watchers(-1)

    def __call__(self, event: LayerExecuted) -> None:
        """Count a layer's routed tokens by expert and by the processor that computed them."""
        self._cache(event)
        first = event.layer * self._num_experts
        if event.load is not None and event.plan is not None:
            on_cpu = set(event.plan.cpu)
            for expert, tokens in zip(event.load.experts, event.load.tokens, strict=True):
                uses = self._by_host if expert in on_cpu else self._by_device
                _count(uses, first + expert, tokens)
        elif event.chosen is not None:
            for expert in event.chosen.flatten().tolist():
                if 0 <= expert < self._num_experts:
                    _count(self._by_host, first + expert, 1)

    def step_done(self, seconds: float, num_tokens: int) -> None:
        """Record one step of the batch: its duration and the number of tokens that it produced."""
        if not self._is_watched:
            return
        self._tokens += num_tokens
        before, self._busy_before = self._busy_before, self._busy()
        cpu, device, link, clock = (
            now - then for now, then in zip(self._busy_before, before, strict=True)
        )
        if self._executor.cache is None:
            cpu = clock = seconds
        self._steps.append(
            {
                "cpu": round(cpu * 1e3, 3),
                "device": round(device * 1e3, 3),
                "link": round(link * 1e3, 3),
                "all": round(max(clock, cpu, device, link) * 1e3, 3),
            }
        )

    @property
    def is_watched(self) -> bool:
        """Whether the server's page is open somewhere, so that snapshots are sent."""
        return self._is_watched

    def due(self) -> str | None:
        """Return a snapshot as JSON text if it is time for the next one; None otherwise."""
        now = time.perf_counter()
        if not self._is_watched or now - self._last_sent < _PERIOD_SECONDS:
            return None
        self._last_sent = now
        return self._snapshot(now)

    def _count_watchers(self, change: int) -> None:
        if self._executor.cache is not None:
            self._executor.cache.clock.watchers += change

    def _busy(self) -> tuple[float, float, float, float]:
        """Return busy seconds of CPU, device and link, and the planner's clock; 0 without cache."""
        if self._executor.cache is None:
            return (0.0, 0.0, 0.0, 0.0)
        clock = self._executor.cache.clock
        return clock.cpu_busy, clock.gpu_busy, clock.link_busy, clock.now

    def _snapshot(self, now: float) -> str:
        seconds, cache = now - self._since, self._executor.cache
        snapshot = {
            "layers": self._num_layers,
            "experts": self._num_experts,
            "device": None if cache is None else cache.device.name,
            "slots": 0 if cache is None else cache.num_slots,
            "where": _text(self._where()),
            "by_host": _text(self._by_host),
            "by_device": _text(self._by_device),
            "steps": list(self._steps),
            "tokens_per_second": round(self._tokens / seconds, 2) if seconds > 0 else 0.0,
            "hits": self._cache.hits,
            "active": self._cache.active,
            "copies": self._cache.copies,
        }
        self._clear()
        return json.dumps(snapshot, separators=(",", ":"))

    def _where(self) -> bytes:
        """Return `ON_HOST`, `ARRIVING` or `ON_DEVICE` for each expert, one byte each."""
        if self._executor.cache is None:
            return bytes(self._num_layers * self._num_experts)
        where = {READY: ON_DEVICE, COPYING: ARRIVING}
        return bytes(where.get(s, ON_HOST) for s in self._executor.cache.planner.residency.state)


def _count(uses: bytearray, cell: int, tokens: int) -> None:
    uses[cell] = min(_MOST_USES, uses[cell] + tokens)


def _text(data: bytes | bytearray) -> str:
    return base64.b64encode(data).decode("ascii")
