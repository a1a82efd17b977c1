"""The planner's model of the link: copies in progress, served in order, one at a time."""

UNLIMITED = 1 << 30


class LinkQueue:
    """Estimates when each copy ends; each reported completion corrects the estimate."""

    def __init__(self, copy_seconds: float) -> None:
        """Start idle; one copy takes `copy_seconds`."""
        self.copy_seconds = copy_seconds
        self.free_at = 0.0  # when all issued copies are expected to be done
        self.pending: dict[int, int] = {}  # key -> number in the order of issue
        self._issued = 0

    def issue(self, key: int, now: float) -> None:
        """Queue the copy of an expert; it starts at `now` or after the copies before it."""
        start = self.free_at if self.free_at > now else now
        self.free_at = start + self.copy_seconds
        self.pending[key] = self._issued
        self._issued += 1

    def finish(self, key: int, now: float) -> None:
        """Record a copy's end at `now`; pending copies are expected to follow without a gap."""
        del self.pending[key]
        self.free_at = now + len(self.pending) * self.copy_seconds

    def busy_seconds(self, now: float) -> float:
        """Return for how many seconds from `now` queued copies will keep the link busy."""
        return self.free_at - now if self.free_at > now else 0.0

    def whole_copies(self, seconds: float) -> int:
        """Return how many copies an idle link would finish in `seconds`."""
        return int(min(seconds / self.copy_seconds, UNLIMITED)) if self.copy_seconds else UNLIMITED

    def idle_copies(self, now: float, next_plan: float) -> int:
        """Return how many new copies would end by `next_plan`; at least 1 if the link is idle."""
        busy = self.busy_seconds(now)
        if self.copy_seconds == 0.0:
            return UNLIMITED
        return max(int((next_plan - now - busy) / self.copy_seconds), busy == 0.0)

    def remaining_seconds(self, key: int, now: float) -> float:
        """Return the seconds until a pending copy ends; slightly above 0 if it is overdue."""
        num_after = self._issued - 1 - self.pending[key]
        return max(self.free_at - num_after * self.copy_seconds - now, 1e-9)
