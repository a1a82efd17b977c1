"""The link to a GPU: copies are queued on streams of their own, and events keep the order.

The order that `copy_engine` demands holds in the GPU's time, not in the host's:

    queue     the stream waits for the last read of the slot and for the slot's last copy, then
              copies the bytes, then records an event (written)
      -> use  the compute stream waits for that event, then the batch reads the slot
      -> end  an event after the batch (read), for which the next copy into the slot waits

So for the host a copy *lands* when it is queued: from then on a batch that reads its slot may be
launched. `arrivals` reports a copy to the planner when the copy's event has passed.

A queued copy cannot be cancelled. So prefetches are held on the host until the link has little left
to do, and are then queued, several in one call. A held copy can be cancelled; a batch that claims
its slot queues it at once. Copies are whole experts, of megabytes each, from pinned memory. If all
experts are in host memory, only `drain` and `close` wait.

If experts are on a disk, a copy keeps its expert's host slot until its event has passed. Prefetches
are also held until their bytes have been read; fetches wait for the disk. An expert that leaves a
device slot is first copied back if host memory should keep it.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from typing import NamedTuple

from tandem.devices.cuda.streams import CudaStreams, Event, HostCopy, Stream
from tandem.experts.cache.clock import WallClock
from tandem.experts.cache.slots import NOTHING, Claim, Slots, SlotUse
from tandem.experts.store.held_expert import HeldExpert
from tandem.experts.store.host_store import HostStore
from tandem.policy.plan import Copy, Geometry

# Prefetches are queued for this much time of the link, which is longer than the time between two
# layers.
AHEAD_SECONDS = 5e-4
_FEWEST_AHEAD = 2
# Copies that a layer waits for share an event and a driver call, which both cost host time. Those
# that come first are few, so that the link begins while the host prepares the others.
_FIRST_AT_ONCE = 4


class SlotEvents:
    """Events of each slot's last write and last read; the copy engine and the device share them."""

    def __init__(self) -> None:
        """Start without events."""
        self.written: dict[int, Event] = {}
        self.read: dict[int, Event] = {}

    def note_read(self, claims: Sequence[Claim], event: Event) -> None:
        """Record that the batch whose end is `event` reads the slots of `claims`.

        `event` replaces the event of an earlier read, because it comes later on the same stream.
        """
        for slot, _ in claims:
            self.read[slot] = event

    def clear(self) -> None:
        """Forget all events; must be called when the slots get new memory."""
        self.written.clear()
        self.read.clear()


class Link(NamedTuple):
    """The speed of copies, in bytes per second."""

    real: float
    limit: float | None = None
    """The speed to which the link is limited, to imitate a slower machine; None: no limit."""

    @property
    def rate(self) -> float:
        """The lower of the real speed and the limit, in bytes per second."""
        return self.real if self.limit is None else min(self.limit, self.real)

    def pause_seconds(self, num_bytes: int) -> float:
        """Return the pause after a copy of `num_bytes` that lowers the link's speed to `rate`."""
        return num_bytes / self.rate - num_bytes / self.real

    def most_ahead(self, num_bytes: int) -> int:
        """Return how many prefetches of `num_bytes` each may be queued at a time."""
        return max(_FEWEST_AHEAD, int(AHEAD_SECONDS * self.rate / num_bytes))


@dataclass(slots=True, eq=False)
class _Job:
    """A copy that has been submitted."""

    copy: Copy
    generation: int
    is_ahead: bool
    leaves: int
    """The key of the expert that the copy overwrites; `NOTHING` if the slot is empty."""
    held: HeldExpert | None = None
    """The expert in host memory, held until its bytes are in the slot."""
    back: HeldExpert | None = None
    """Host memory to which the overwritten expert is first copied back; None: it is dropped."""

    def let_go(self) -> None:
        """Release the expert's host memory."""
        if self.held is not None:
            self.held.let_go()
            self.held = None

    def end(self) -> None:
        """Release the copied expert's host memory; keep the expert that was copied back, if any."""
        self.let_go()
        if self.back is not None:
            self.back.keep()
            self.back = None


class _UnderWay(NamedTuple):
    """A copy that is queued on a stream, and the event after it."""

    job: _Job
    done: Event


class CudaCopyEngine:
    """Queues copies to a GPU. Only the executor's thread may call it."""

    def __init__(
        self,
        store: HostStore,
        slots: Slots,
        geometry: Geometry,
        clock: WallClock,
        streams: CudaStreams,
        events: SlotEvents,
        link: Link,
    ) -> None:
        """Take the store to copy from, the slots to copy into, and the streams of their device."""
        self.slots = slots
        self._store = store
        self._geometry = geometry
        self._clock = clock
        self._streams = streams
        self._events = events
        self._link = link
        # With a throttled link, two streams would get twice its rate.
        self._stream_ahead = Stream.AHEAD if link.limit is None else Stream.FETCH
        self._most_ahead = link.most_ahead(max(layer.image_bytes for layer in store))
        self._num_ahead = 0  # prefetches that are under way
        self._takes_back = store.slots is not None
        self._kept: deque[_Job] = deque()
        self._under_way: dict[Stream, deque[_UnderWay]] = {
            Stream.FETCH: deque(),
            Stream.AHEAD: deque(),
        }
        events.clear()

    def submit(self, copies: Sequence[Copy], *, is_needed: bool) -> None:
        """Queue copies now if a layer needs them (`is_needed`), else hold them until `flush`."""
        if not is_needed:
            self._kept += [self._job(copy, is_ahead=True) for copy in copies]
            return
        for some in (copies[:_FIRST_AT_ONCE], copies[_FIRST_AT_ONCE:]):
            self._queue([self._job(copy, is_ahead=False) for copy in some], Stream.FETCH)

    def _job(self, copy: Copy, *, is_ahead: bool) -> _Job:
        leaves = self.slots.key_in(copy.slot)
        generation = self.slots.plan_copy(copy.slot, self._geometry.key(copy.layer, copy.expert))
        return _Job(copy, generation, is_ahead=is_ahead, leaves=leaves)

    def flush(self) -> None:
        """Queue held copies whose bytes are in host memory, if the link has little left to do."""
        first = islice(self._kept, max(0, self._most_ahead - self._num_ahead))
        come = [job for job in first if self._has_come(job)]
        if come:
            self._take(come, self._stream_ahead)

    def _has_come(self, job: _Job) -> bool:
        """Tell whether a copy's expert is in host memory; if not, start its read if possible."""
        if job.held is None:
            job.held = self._store[job.copy.layer].try_hold(job.copy.expert)
        return job.held is not None and job.held.has_come()

    def _take(self, jobs: Sequence[_Job], stream: Stream) -> None:
        """Queue `jobs`, which must be held copies, on a stream; they are held no longer."""
        for job in jobs:
            self._kept.remove(job)
        self._queue(jobs, stream)

    def use(self, slots: Sequence[int], keys: Sequence[int]) -> SlotUse:
        """Claim slots for a batch that reads the experts `keys`; return the claims.

        Before the batch, the compute stream waits for copies into these slots that are not done.
        """
        return self.slots.begin_use(slots, keys, self._fill)

    def arrivals(self) -> Iterable[tuple[int, int, float]]:
        """Return (layer, expert, time) of each copy that has ended since the last call.

        Also calls `flush`. Never waits.
        """
        arrived = []
        for queue in self._under_way.values():
            while queue and queue[0].done.query():
                job, done = queue.popleft()
                job.end()
                copy = job.copy
                if self._events.written.get(copy.slot) is done:
                    del self._events.written[copy.slot]
                self._num_ahead -= job.is_ahead
                # Two streams share the link, so it is busy for the time of the bytes, not for the
                # sum of the copies' times.
                self._clock.add_link(self._store[copy.layer].image_bytes / self._link.rate)
                arrived.append((copy.layer, copy.expert, self._clock.now))
        self.flush()
        return arrived

    def cancel(self, layer: int, experts: Sequence[int]) -> list[int]:
        """Cancel held copies of a layer's `experts`; return the experts of the cancelled copies.

        Copies that are already queued go on.
        """
        cancelled = [
            job for job in self._kept if job.copy.layer == layer and job.copy.expert in experts
        ]
        for job in cancelled:
            self._kept.remove(job)
            job.let_go()
            self.slots.void(job.copy.slot, job.generation)
        return [job.copy.expert for job in cancelled]

    def drain(self) -> None:
        """Queue all held copies, and wait until every queued copy has ended."""
        self._take(list(self._kept), self._stream_ahead)
        for queue in self._under_way.values():
            if queue:
                queue[-1].done.synchronize()
                for job, _ in queue:
                    job.end()

    def close(self) -> None:
        """Wait until no stream reads or writes the slots, so that their memory can be freed."""
        try:
            self._streams.synchronize()
        finally:
            under_way = ([at.job for at in queue] for queue in self._under_way.values())
            for job in chain(self._kept, *under_way):
                job.let_go()
            self._kept.clear()
        self._events.clear()

    def _queue(self, jobs: Sequence[_Job], stream: Stream) -> None:
        """Queue copies on a stream: together, or in several groups if host slots run out.

        Waits for experts that must be read from a disk.
        """
        held: list[_Job] = []
        for job in jobs:
            self._has_come(job)  # starts all reads that there is room for
        for job in jobs:
            if job.held is None:
                self._copy(held, stream)
                held = []
                job.held = self._held_in_turn(job.copy)
            job.held.wait()
            held.append(job)
        self._copy(held, stream)

    def _held_in_turn(self, copy: Copy) -> HeldExpert:
        """Return the expert of `copy`, held in host memory; waits until a host slot is free."""
        layer, held = self._store[copy.layer], None
        for job, done in chain(*self._under_way.values()):
            if job.held is not None:
                done.synchronize()
                job.end()
                held = layer.try_hold(copy.expert)
            if held is not None:
                return held
        return layer.hold(copy.expert)

    def _copy(self, jobs: Sequence[_Job], stream: Stream) -> None:
        """Queue copies of experts that are in host memory, and mark the copies as landed.

        The stream first waits until earlier reads of the slots, and copies into them, have ended.
        """
        if not jobs:
            return
        events, streams, slots = self._events, self._streams, self.slots
        copies, back, num_bytes = list[HostCopy](), list[HostCopy](), 0
        before: dict[Event, None] = {}  # an ordered set
        for job in jobs:
            copy = job.copy
            assert slots.can_write(copy.slot, job.generation), f"slot {copy.slot} is in use"
            assert job.held is not None
            uses = events.read.pop(copy.slot, None), events.written.get(copy.slot)
            before |= dict.fromkeys(use for use in uses if use is not None)
            host, memory = self._store[copy.layer], slots.memory(copy.slot)
            num_bytes += host.image_bytes
            job.back = self._taken_back(job.leaves)
            for offset, data in [] if job.back is None else job.back.extents:
                back.append(HostCopy(data, memory[offset : offset + len(data)]))
            for offset, data in job.held.extents:
                copies.append(HostCopy(memory[offset : offset + len(data)], data))
        for event in before:
            streams.wait(stream, event)
        if back:
            streams.copy(stream, back)
        streams.copy(stream, copies)
        if self._link.limit is not None:
            streams.pause(stream, self._link.pause_seconds(num_bytes))
        done = streams.record(stream)
        for job in jobs:
            events.written[job.copy.slot] = done
            self._under_way[stream].append(_UnderWay(job, done))
            self._num_ahead += job.is_ahead
        slots.land((job.copy.slot, job.generation) for job in jobs)

    def _taken_back(self, key: int) -> HeldExpert | None:
        """Return host memory for copying back the evicted expert `key`; None: it is not copied."""
        if key == NOTHING or not self._takes_back:
            return None
        layer, expert = self._geometry.expert_id(key)
        return self._store[layer].take_back(expert)

    def _fill(self, claims: Sequence[Claim]) -> None:
        """Queue held copies into claimed slots; the compute stream waits for all copies there."""
        claimed = [job for job in self._kept if (job.copy.slot, job.generation) in claims]
        if claimed:
            self._take(claimed, Stream.FETCH)
        written = (self._events.written.get(slot) for slot, _ in claims)
        for event in dict.fromkeys(event for event in written if event is not None):
            self._streams.wait(Stream.COMPUTE, event)
