"""The link on the wall clock: a thread that copies expert by expert, urgent copies first.

Two rules, both checked under one lock (`Slots.changed`), keep the order of `copy_engine`: a copy is
written only if `Slots.can_write` allows it, and it arrives once it is written.
"""

import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tandem.experts.cache.clock import WallClock
from tandem.experts.cache.copy_engine import CopyEngine
from tandem.experts.cache.slots import Slots, SlotUse
from tandem.experts.store.host_store import HostStore
from tandem.policy.plan import Copy, Geometry


@dataclass(slots=True)
class Job:
    """A copy that has not arrived."""

    copy: Copy
    generation: int
    is_needed: bool
    has_begun: bool = False


class CopyThread(CopyEngine):
    """Copies on a thread of its own at a settable bandwidth."""

    def __init__(
        self,
        store: HostStore,
        slots: Slots,
        geometry: Geometry,
        clock: WallClock,
        *,
        bytes_per_second: float | None = None,
    ) -> None:
        """Start the thread; with `bytes_per_second` None it copies at memory speed."""
        self.slots = slots
        self._store = store
        self._geometry = geometry
        self._clock = clock
        self._rate = bytes_per_second
        self._queue: list[Job] = []
        self._arrived: list[tuple[int, int, float]] = []
        self._error: BaseException | None = None
        self._is_closing = False
        self._thread = threading.Thread(target=self._loop, name="tandem-link", daemon=True)
        self._thread.start()

    def submit(self, copies: Sequence[Copy], *, is_needed: bool) -> None:
        """Queue copies; raises the error that stopped the link, if any."""
        with self.slots.changed:
            self._raise_error()
            for copy in copies:
                key = self._geometry.key(copy.layer, copy.expert)
                generation = self.slots.plan_copy(copy.slot, key)
                self._queue.append(Job(copy, generation, is_needed))
            self.slots.changed.notify_all()

    def use(self, slots: Sequence[int], keys: Sequence[int]) -> SlotUse:
        """Claim slots; copies into them become urgent."""
        use = self.slots.begin_use(slots, keys)
        with self.slots.changed:
            for job in self._queue:
                if (job.copy.slot, job.generation) in use.claims:
                    job.is_needed = True
        return use

    def arrivals(self) -> Iterable[tuple[int, int, float]]:
        """Return the copies that arrived since the last call."""
        with self.slots.changed:
            self._raise_error()
            arrived, self._arrived = self._arrived, []
        return arrived

    def cancel(self, layer: int, experts: Sequence[int]) -> list[int]:
        """Cancel the layer's copies that have not begun and that no layer waits for."""
        cancelled = []
        with self.slots.changed:
            for job in [*self._queue]:
                copy, slot = job.copy, job.copy.slot
                is_meant = copy.layer == layer and copy.expert in experts
                is_idle = not job.has_begun and not job.is_needed
                if is_meant and is_idle and self.slots.can_write(slot, job.generation):
                    self.slots.void(slot, job.generation)
                    self._queue.remove(job)
                    cancelled.append(copy.expert)
        return cancelled

    def drain(self) -> None:
        """Wait for all copies; raises the error that stopped the link, if any."""
        with self.slots.changed:
            self.slots.changed.wait_for(lambda: not self._queue or self._error)
            self._raise_error()

    def close(self) -> None:
        """Stop the thread; unfinished copies are dropped."""
        with self.slots.changed:
            self._is_closing = True
            self.slots.changed.notify_all()
        if self._thread is not threading.current_thread():  # garbage is collected on any thread
            self._thread.join()

    def _raise_error(self) -> None:
        if self._error is not None:
            raise RuntimeError(f"the link has stopped: {self._error}") from self._error

    def _loop(self) -> None:
        changed = self.slots.changed
        while True:
            with changed:
                changed.wait_for(lambda: self._is_closing or self._next() is not None)
                job = self._next()
                if self._is_closing or job is None:
                    return
                job.has_begun = True
            try:
                self.write(job)
            except BaseException as error:  # raised in the callers that wait, submit or ask
                self._error = error
                self.slots.fail(error)
                return
            self._finish(job)

    def _next(self) -> Job | None:
        """Return the most urgent copy that may be written now."""
        can_write = self.slots.can_write
        return self.most_urgent([j for j in self._queue if can_write(j.copy.slot, j.generation)])

    def most_urgent(self, ready: list[Job]) -> Job | None:
        """Return the next copy among those that may be written now."""
        return min(ready, key=lambda job: not job.is_needed, default=None)

    def write(self, job: Job) -> None:
        """Copy an expert, taking the time that the bandwidth implies."""
        begin, num_bytes = time.perf_counter(), 0
        memory = self.slots.memory(job.copy.slot)
        with self._store[job.copy.layer].hold(job.copy.expert) as extents:
            for extent in extents:
                memory[extent.offset : extent.offset + len(extent.data)].copy_(extent.data)
                num_bytes += len(extent.data)
        if self._rate is not None:
            time.sleep(max(0.0, num_bytes / self._rate - (time.perf_counter() - begin)))
        self._clock.add_link(time.perf_counter() - begin)

    def _finish(self, job: Job) -> None:
        copy = job.copy
        with self.slots.changed:
            self._queue.remove(job)
            self._arrived.append((copy.layer, copy.expert, self._clock.now))
            self.slots.land([(copy.slot, job.generation)])
