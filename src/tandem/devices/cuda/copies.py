"""The link to a GPU: copies are queued on streams of their own, and events keep the order.

What `copy_engine` promises is kept on the GPU's time, not on the host's:

    queue     the stream waits for the last read of the slot and for the slot's last copy,
              then come the bytes, then an event (written)
      -> use  the compute stream waits for that event, then the batch reads
      -> end  an event behind the batch (read), for which the next copy into the slot waits

So for the host a copy *lands* when it is queued: from then on a batch may be launched that reads
it. The planner hears of it when its event has passed, as `arrivals`.

What is queued on a stream cannot be called back. So copies ahead are held on the host until the
link has little left to do, and only then queued, several in one call; those that are held can be
cancelled. A batch that claims one has it queued at once. Copies are whole experts, of megabytes
each, from pinned memory; nothing here waits but `drain` and `close`.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from tandem.devices.cuda.streams import CudaStreams, Event, HostCopy, Stream
from tandem.experts.cache.clock import WallClock
from tandem.experts.cache.slots import Claim, Slots, SlotUse
from tandem.experts.store.host_store import HostStore
from tandem.policy.plan import Copy, Geometry

# Copies ahead are queued for so long a time of the link: more than passes between two layers.
AHEAD_SECONDS = 5e-4
_FEWEST_AHEAD = 2


class SlotEvents:
    """The last write and the last reads of each slot, as events; shared with the device."""

    def __init__(self) -> None:
        """Know of nothing."""
        self.written: dict[int, Event] = {}
        self.read: dict[int, Event] = {}

    def note_read(self, claims: Sequence[Claim], event: Event) -> None:
        """Note that the batch before an event reads these slots; later events cover earlier."""
        for slot, _ in claims:
            self.read[slot] = event

    def clear(self) -> None:
        """Forget all: the slots are other memory now."""
        self.written.clear()
        self.read.clear()


class Link(NamedTuple):
    """How fast copies are, in bytes per second."""

    real: float
    wanted: float | None = None
    """Makes the link slower than it is, so that a fast machine stands in for another."""

    @property
    def rate(self) -> float:
        """Bytes per second as the runtime has them."""
        return self.real if self.wanted is None else min(self.wanted, self.real)

    def pause_seconds(self, num_bytes: int) -> float:
        """Return what a copy must wait after it."""
        return num_bytes / self.rate - num_bytes / self.real

    def most_ahead(self, num_bytes: int) -> int:
        """Return how many copies ahead of this size are queued at a time."""
        return max(_FEWEST_AHEAD, int(AHEAD_SECONDS * self.rate / num_bytes))


class _Job(NamedTuple):
    """A copy that has been submitted."""

    copy: Copy
    generation: int
    is_ahead: bool


class _UnderWay(NamedTuple):
    """A copy that is queued."""

    job: _Job
    done: Event


class CudaCopyEngine:
    """Queues copies; called by the executor's thread alone."""

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
        """Copy from a store into slots on the device of `streams`."""
        self.slots = slots
        self._store = store
        self._geometry = geometry
        self._clock = clock
        self._streams = streams
        self._events = events
        self._link = link
        # Two streams would share the link and double a throttled one.
        self._stream_ahead = Stream.AHEAD if link.wanted is None else Stream.FETCH
        self._most_ahead = link.most_ahead(max(layer.image_bytes for layer in store))
        self._num_ahead = 0  # of those under way
        self._held: deque[_Job] = deque()
        self._under_way: dict[Stream, deque[_UnderWay]] = {
            Stream.FETCH: deque(),
            Stream.AHEAD: deque(),
        }
        events.clear()

    def submit(self, copy: Copy, *, is_needed: bool) -> None:
        """Queue a copy; one for later is held until `flush`."""
        generation = self.slots.plan_copy(copy.slot, self._geometry.key(copy.layer, copy.expert))
        if is_needed:
            self._queue([_Job(copy, generation, is_ahead=False)], Stream.FETCH)
        else:
            self._held.append(_Job(copy, generation, is_ahead=True))

    def flush(self) -> None:
        """Queue what is held, as far as the link is about to run out of work."""
        count = min(len(self._held), self._most_ahead - self._num_ahead)
        if count > 0:
            self._queue([self._held.popleft() for _ in range(count)], self._stream_ahead)

    def use(self, slots: Sequence[int], keys: Sequence[int]) -> SlotUse:
        """Claim slots; the compute stream will wait for those whose bytes are still coming."""
        return self.slots.begin_use(slots, keys, self._bring)

    def arrivals(self) -> Iterable[tuple[int, int, float]]:
        """Return the copies that have ended since the last call; asks events, waits for none."""
        arrived = []
        for queue in self._under_way.values():
            while queue and queue[0].done.query():
                (copy, _, is_ahead), done = queue.popleft()
                if self._events.written.get(copy.slot) is done:
                    del self._events.written[copy.slot]
                self._num_ahead -= is_ahead
                # Two streams share the link: it is busy for what its bytes take, not for their sum.
                self._clock.add_link(self._store[copy.layer].image_bytes / self._link.rate)
                arrived.append((copy.layer, copy.expert, self._clock.now))
        self.flush()
        return arrived

    def cancel(self, layer: int, experts: Sequence[int]) -> list[int]:
        """Give up copies of a layer that are held; what is queued on a stream is copied."""
        cancelled = [
            job for job in self._held if job.copy.layer == layer and job.copy.expert in experts
        ]
        for job in cancelled:
            self._held.remove(job)
            self.slots.void(job.copy.slot, job.generation)
        return [job.copy.expert for job in cancelled]

    def drain(self) -> None:
        """Queue and wait for every copy."""
        if self._held:
            self._queue(list(self._held), self._stream_ahead)
            self._held.clear()
        for queue in self._under_way.values():
            if queue:
                queue[-1].done.synchronize()

    def close(self) -> None:
        """Wait until nothing reads or writes the slots any more: their memory may go."""
        self._held.clear()
        self._streams.synchronize()
        self._events.clear()

    def _queue(self, jobs: Sequence[_Job], stream: Stream) -> None:
        """Queue copies on a stream, behind all that reads or writes their slots; they land."""
        events, streams, slots = self._events, self._streams, self.slots
        copies, num_bytes = list[HostCopy](), 0
        for copy, generation, _ in jobs:
            assert slots.can_write(copy.slot, generation), f"slot {copy.slot} is in use"
            for before in (events.read.pop(copy.slot, None), events.written.get(copy.slot)):
                if before is not None:
                    streams.wait(stream, before)
            host, memory = self._store[copy.layer], slots.memory(copy.slot)
            num_bytes += host.image_bytes
            for offset, data in host.extents(copy.expert):
                copies.append(HostCopy(memory[offset : offset + len(data)], data))
        streams.copy(stream, copies)
        if self._link.wanted is not None:
            streams.pause(stream, self._link.pause_seconds(num_bytes))
        done = streams.record(stream)
        for job in jobs:
            events.written[job.copy.slot] = done
            self._under_way[stream].append(_UnderWay(job, done))
            self._num_ahead += job.is_ahead
            slots.land(job.copy.slot, job.generation)

    def _bring(self, claims: Sequence[Claim]) -> None:
        """Queue claimed copies that are held, and let the compute stream wait for all claimed."""
        if self._held:
            wanted = [job for job in self._held if (job.copy.slot, job.generation) in claims]
            for job in wanted:
                self._held.remove(job)
            if wanted:
                self._queue(wanted, Stream.FETCH)
        for slot, _ in claims:
            written = self._events.written.get(slot)
            if written is not None:
                self._streams.wait(Stream.COMPUTE, written)
