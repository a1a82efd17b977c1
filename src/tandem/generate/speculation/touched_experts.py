"""Estimates the relative cost of multi-token steps from the experts in an executor's events."""

import contextlib
import weakref
from collections.abc import Callable

from tandem.experts.cache.expert_cache import ExpertCache
from tandem.experts.execution.executor import Executor
from tandem.experts.tracing.events import LayerExecuted
from tandem.policy.speculation.step_shape import TouchedExperts


def touched_experts(executor: Executor, cache: ExpertCache) -> TouchedExperts:
    """Return an estimate of steps' relative times, which learns from the executor's events.

    The estimate stops learning once nothing refers to it.
    """
    touched = TouchedExperts(lambda: cache.planner)
    listener = _listener(weakref.ref(touched))
    executor.listeners.append(listener)

    def forget() -> None:
        with contextlib.suppress(ValueError):  # stop listening
            executor.listeners.remove(listener)

    weakref.finalize(touched, forget)
    return touched


def _listener(
    reference: "weakref.ReferenceType[TouchedExperts]",
) -> Callable[[LayerExecuted], None]:
    def listener(event: LayerExecuted) -> None:
        touched = reference()
        if touched is not None and event.load is not None:
            touched.observe(event.load)

    return listener
