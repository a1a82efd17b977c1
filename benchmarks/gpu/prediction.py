"""The simulator's forecast of measured steps: the same routing, slots and profile."""

from collections.abc import Sequence

import numpy as np

from tandem.experts.cache.expert_cache import ExpertCache
from tandem.experts.tracing.events import LayerExecuted
from tandem.sim.replay import ReplaySettings, replay
from tandem.trace import RoutingTrace, TraceMeta


class Prediction:
    """Records events from before the warm-up steps on; add it to an executor's listeners."""

    def __init__(self, cache: ExpertCache, batch: int) -> None:
        """Record the resident experts; the replay begins with them."""
        self._cache, self._batch = cache, batch
        self._resident, self._num_slots = cache.resident(), cache.num_slots
        self._layers: list[LayerExecuted] = []

    def __call__(self, event: LayerExecuted) -> None:
        """Store an event."""
        self._layers.append(event)

    def decode_tokens_per_second(self, steps: int) -> float | None:
        """Return the predicted speed of the last `steps` steps; None if routing is missing."""
        chosen = self._chosen()
        if chosen is None or len(chosen) <= steps:
            return None
        before = self._seconds(chosen[:-steps])
        seconds = self._seconds(chosen) - before
        return steps * self._batch / seconds if seconds > 0 else None

    def _chosen(self) -> np.ndarray[tuple[int, ...], np.dtype[np.uint16]] | None:
        """Return the experts of complete steps: (steps, batch, layers, top_k)."""
        num_layers = self._cache.geometry.num_layers
        steps: list[list[Sequence[Sequence[int]]]] = []
        for event in self._layers:
            if event.load is None or len(event.load.routes) != self._batch:
                return None
            if event.layer == 0:
                steps.append([])
            if steps:
                steps[-1].append(event.load.routes)
        whole = [step for step in steps if len(step) == num_layers]
        if not whole:
            return None
        return np.array(whole, dtype=np.uint16).transpose(0, 2, 1, 3)

    def _seconds(self, chosen: np.ndarray[tuple[int, ...], np.dtype[np.uint16]]) -> float:
        """Replay steps on the virtual clock."""
        geometry, cache = self._cache.geometry, self._cache
        num_steps = len(chosen)
        experts = chosen.transpose(1, 0, 2, 3).reshape(-1, *chosen.shape[2:])
        meta = TraceMeta(
            model="measured", n_moe_layers=geometry.num_layers, n_experts=geometry.num_experts,
            top_k=geometry.top_k,
        )  # fmt: skip
        trace = RoutingTrace(
            meta=meta, experts=experts, seq_offsets=np.arange(self._batch + 1) * num_steps
        )
        run = ReplaySettings(
            settings=cache.settings, profile=cache.machine.profile, shape=cache.machine.shape,
            num_slots=self._num_slots, batch=self._batch, prompt=0, compare_every=0,
        )  # fmt: skip
        return replay(trace, run, resident=self._resident).decode_seconds
