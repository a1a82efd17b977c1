"""The link to a GPU: copies are queued on streams of their own, and events keep the order.

What `copy_engine` promises is kept on the GPU's time, not on the host's:

    submit    the lane waits for the last read of the slot and for the slot's last copy,
              then come the bytes, then an event (written)
      -> use  the compute lane waits for that event, then the batch reads
      -> end  an event behind the batch (read), for which the next copy into the slot waits

So for the host a copy *lands* when it is queued: from then on a batch may be launched that reads
it. The planner hears of it when its event has passed, as `arrivals`. Copies are whole experts, of
megabytes each, from pinned memory; nothing here waits but `drain` and `close`.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from tandem.offload.clock import WallClock
from tandem.offload.copy_engine import copy_image
from tandem.offload.cuda_streams import Event, Lane, Streams
from tandem.offload.host_store import HostStore
from tandem.offload.slots import Claim, Slots, SlotUse
from tandem.policy.plan import Copy, Geometry


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


class Throttle(NamedTuple):
    """Makes a link slower than it is: a fast machine stands in for another."""

    wanted_bytes_per_second: float
    real_bytes_per_second: float

    def pause_seconds(self, num_bytes: int) -> float:
        """Return what a copy must wait after it."""
        seconds = num_bytes / self.wanted_bytes_per_second
        return max(0.0, seconds - num_bytes / self.real_bytes_per_second)


class _UnderWay(NamedTuple):
    """A copy that is queued."""

    layer: int
    expert: int
    slot: int
    done: Event


class CudaCopyEngine:
    """Queues copies; called by the executor's thread alone."""

    def __init__(
        self,
        store: HostStore,
        slots: Slots,
        geometry: Geometry,
        clock: WallClock,
        streams: Streams,
        events: SlotEvents,
        throttle: Throttle | None = None,
    ) -> None:
        """Copy from a store into slots on the device of `streams`."""
        self.slots = slots
        self._store = store
        self._geometry = geometry
        self._clock = clock
        self._streams = streams
        self._events = events
        self._throttle = throttle
        self._under_way: dict[Lane, deque[_UnderWay]] = {Lane.FETCH: deque(), Lane.AHEAD: deque()}
        events.clear()

    def submit(self, copy: Copy, *, is_needed: bool) -> None:
        """Queue a copy; a needed one passes by those for later."""
        slot, events = copy.slot, self._events
        generation = self.slots.plan_copy(slot, self._geometry.key(copy.layer, copy.expert))
        assert self.slots.can_write(slot, generation), f"slot {slot} is in use"
        # Two lanes would share the link and double a throttled one.
        lane = Lane.FETCH if is_needed or self._throttle is not None else Lane.AHEAD
        for before in (events.read.pop(slot, None), events.written.get(slot)):
            if before is not None:
                self._streams.wait(lane, before)
        memory = self.slots.memory(slot)
        self._streams.run(lane, lambda: copy_image(self._store, copy.layer, copy.expert, memory))
        num_bytes = self._store[copy.layer].image_bytes
        if self._throttle is not None:
            self._streams.pause(lane, self._throttle.pause_seconds(num_bytes))
        done = self._streams.record(lane)
        events.written[slot] = done
        self._under_way[lane].append(_UnderWay(copy.layer, copy.expert, slot, done))
        self.slots.land(slot, generation)

    def use(self, slots: Sequence[int], keys: Sequence[int]) -> SlotUse:
        """Claim slots; the compute lane will wait for those whose bytes are still coming."""
        return self.slots.begin_use(slots, keys, self._wait)

    def arrivals(self) -> Iterable[tuple[int, int, float]]:
        """Return the copies that have ended since the last call; asks events, waits for none."""
        arrived = []
        for queue in self._under_way.values():
            while queue and queue[0].done.query():
                copy = queue.popleft()
                if self._events.written.get(copy.slot) is copy.done:
                    del self._events.written[copy.slot]
                arrived.append((copy.layer, copy.expert, self._clock.now))
        return arrived

    def cancel(self, layer: int, experts: Sequence[int]) -> list[int]:
        """Cancel nothing: what is queued on a stream is copied."""
        return []

    def drain(self) -> None:
        """Wait for every copy."""
        for queue in self._under_way.values():
            if queue:
                queue[-1].done.synchronize()

    def close(self) -> None:
        """Wait until nothing reads or writes the slots any more: their memory may go."""
        self._streams.synchronize()
        self._events.clear()

    def _wait(self, claims: Sequence[Claim]) -> None:
        for slot, _ in claims:
            written = self._events.written.get(slot)
            if written is not None:
                self._streams.wait(Lane.COMPUTE, written)
