"""Checks the order of work: clocks of streams and host, and which work used which bytes.

A stream's work comes after work queued before it, after what the host knew when it queued the work,
and after events it waited for. Two uses of the same bytes, one of them a write, must be ordered in
this way. Work runs immediately here, so a missing event shows in no other way.
"""

from collections import defaultdict
from collections.abc import Callable
from typing import NamedTuple

HOST = -1
"""The host's number among the actors; streams are counted from 0."""

Clock = dict[int, int]


class Moment(NamedTuple):
    """One piece of an actor's work, and all work known to precede it."""

    actor: int
    tick: int
    clock: Clock

    def follows(self, actor: int, tick: int) -> bool:
        return self.clock.get(actor, 0) >= tick


class Use(NamedTuple):
    """Bytes that some work reads or writes."""

    low: int
    high: int
    writes: bool
    actor: int
    tick: int
    what: str


class Memory:
    """Bytes of the device, or pinned bytes of the host, and their uses."""

    def __init__(
        self, start: int, num_bytes: int, home: int, on_end: Callable[["Memory"], None] | None
    ) -> None:
        """Create memory at an address; `home` is the stream that allocated it and gets it back."""
        self.start, self.num_bytes, self.home = start, num_bytes, home
        self.uses: list[Use] = []
        self.noted_for: set[int] = set()  # streams of `record_stream`
        self.pool: object | None = None
        self._on_end = on_end

    def __del__(self) -> None:
        if self._on_end is not None:
            self._on_end(self)


class Order:
    """The clocks of all actors."""

    def __init__(self, fault: Callable[[str], None]) -> None:
        """Create the clocks; `fault` is called for unordered work."""
        self._clocks: defaultdict[int, Clock] = defaultdict(dict)
        self._fault = fault

    def next(self, actor: int) -> Moment:
        """Begin a piece of work that the host queues or does itself."""
        clock = self._clocks[actor]
        if actor != HOST:
            self.learn(actor, self._clocks[HOST])
        clock[actor] = clock.get(actor, 0) + 1
        return Moment(actor, clock[actor], dict(clock))

    def now(self, actor: int) -> Clock:
        """Return what precedes an actor's next piece of work."""
        return dict(self._clocks[actor])

    def learn(self, actor: int, clock: Clock) -> None:
        """Order an actor's later work after everything that a clock knows."""
        known = self._clocks[actor]
        for other, tick in clock.items():
            known[other] = max(known.get(other, 0), tick)

    def use(
        self, memory: Memory, low: int, high: int, moment: Moment, what: str, *, writes: bool
    ) -> None:
        """Record a use of bytes; a fault if it is not ordered with an earlier use."""
        kept = []
        for use in memory.uses:
            overlaps = use.low < high and low < use.high
            if overlaps and (use.writes or writes) and not moment.follows(use.actor, use.tick):
                self._fault(
                    f"{_done(what, writes)} on {_name(moment.actor)}, and nothing orders that "
                    f"behind: {_done(use.what, use.writes)} on {_name(use.actor)}"
                )
            covers = low <= use.low and use.high <= high and moment.follows(use.actor, use.tick)
            if not (covers and (writes or not use.writes)):
                kept.append(use)
        kept.append(Use(low, high, writes, moment.actor, moment.tick, what))
        memory.uses = kept

    def end(self, memory: Memory) -> None:
        """Return memory to its home stream; a fault if another stream may still use it."""
        home = self._clocks[memory.home]
        known = {**home}
        for other, tick in self._clocks[HOST].items():
            known[other] = max(known.get(other, 0), tick)
        for use in memory.uses:
            if use.actor in (memory.home, HOST, *memory.noted_for):
                continue
            if known.get(use.actor, 0) < use.tick:
                self._fault(
                    f"memory of {_name(memory.home)} is given back while {_name(use.actor)} may "
                    f"still be at it: {_done(use.what, use.writes)}"
                )


def _name(actor: int) -> str:
    return "the host" if actor == HOST else f"stream {actor}"


def _done(what: str, writes: bool) -> str:
    return f"{what} {'writes' if writes else 'reads'}"
