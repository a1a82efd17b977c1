"""The planner's clock, virtual or real.

On a virtual clock (`sim.Timeline`) every duration is the profile's, so decisions are reproducible.
On the wall clock durations are real.
"""

import time
from collections.abc import Iterable
from typing import Protocol

from tandem.policy.plan import Copy, LayerLoad, LayerPlan


class Clock(Protocol):
    """The planner's time. `run_dense`, `issue` and `run` have an effect only on a virtual clock.

    `cpu_busy`, `gpu_busy` and `link_busy` are the seconds that CPU, GPU and link have worked.
    Measuring a GPU's time costs two timed events per batch, so `gpu_busy` grows only while
    `watchers`, the number of readers of these counters, is above 0.
    """

    cpu_busy: float
    gpu_busy: float
    link_busy: float
    watchers: int

    @property
    def now(self) -> float:
        """Seconds since some fixed moment."""

    def run_dense(self, num_tokens: int) -> None:
        """Advance by the time of one layer's dense parts for `num_tokens` tokens."""
        return

    def arrivals(self) -> Iterable[tuple[int, int, float]]:
        """Return (layer, expert, end time in seconds) of copies that ended since the last call."""

    def issue(self, copies: tuple[Copy, ...]) -> None:
        """Queue on the link the prefetches that begin with a step, before its first layer."""
        return

    def run(self, load: LayerLoad, plan: LayerPlan) -> None:
        """Queue a plan's copies on the link and advance by the time of the layer's experts."""
        return


class WallClock(Clock):
    """Real time, which passes by itself; CPU, device and link report their busy seconds to it."""

    def __init__(self) -> None:
        """Start all busy counters at 0, without watchers."""
        self.cpu_busy = self.gpu_busy = self.link_busy = 0.0
        self.watchers = 0

    def is_watched(self) -> bool:
        """Tell whether a watcher needs the device's busy time."""
        return self.watchers > 0

    def add_cpu(self, seconds: float) -> None:
        """Add busy seconds of the CPU. Each counter may be written by one thread only."""
        self.cpu_busy += seconds

    def add_gpu(self, seconds: float) -> None:
        """Add busy seconds of the device."""
        self.gpu_busy += seconds

    def add_link(self, seconds: float) -> None:
        """Add busy seconds of the link."""
        self.link_busy += seconds

    @property
    def now(self) -> float:
        """Seconds of the machine's monotonic clock."""
        return time.perf_counter()

    def arrivals(self) -> Iterable[tuple[int, int, float]]:
        """Return nothing, because the copy engine reports arrivals."""
        return ()
