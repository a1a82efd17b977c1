"""A link and a device that fail on demand: pauses, reordering, errors, limits."""

import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from tandem.experts.cache.slots import SlotUse
from tandem.experts.execution.batch import ExpertBatch
from tandem.policy.plan import Copy
from tests.experts.copy_thread import CopyThread, Job
from tests.experts.threaded_device import ThreadedDevice


@dataclass(frozen=True, slots=True)
class Disturbance:
    """Disturbs a link with random pauses, random order and errors."""

    random: random.Random
    longest_pause_seconds: float = 0.0
    is_unordered: bool = False
    fault: Callable[[Copy], None] | None = None  # called before each copy; may raise


class DisturbedLink(CopyThread):
    """A link with a thread of its own and a disturbance."""

    def __init__(self, *parts: Any, disturbance: Disturbance, **options: Any) -> None:
        self.disturbance = disturbance  # before the thread starts
        super().__init__(*parts, **options)

    def most_urgent(self, ready: list[Job]) -> Job | None:
        if self.disturbance.is_unordered and ready:
            return self.disturbance.random.choice(ready)
        return super().most_urgent(ready)

    def write(self, job: Job) -> None:
        if self.disturbance.fault is not None:
            self.disturbance.fault(job.copy)
        if longest := self.disturbance.longest_pause_seconds:
            time.sleep(self.disturbance.random.uniform(0.0, longest))
        super().write(job)


class FaultyDevice(ThreadedDevice):
    """An emulated device whose batches fail on demand, and with a limit on pinned memory."""

    fault: Callable[[], None] | None = None
    """Called before every batch; its exception becomes the batch's."""
    may_pin_bytes: int | None = None

    def run(self, batch: ExpertBatch, use: SlotUse) -> None:
        try:
            if self.fault is not None:
                self.fault()
        except BaseException:
            use.end()
            raise
        super().run(batch, use)

    def pin(self, memory: Tensor) -> bool:
        if self.may_pin_bytes is None:
            return True
        if memory.nbytes > self.may_pin_bytes:
            return False
        self.may_pin_bytes -= memory.nbytes
        return True
