"""What of a recorded decode step is native, and what the operations cost that are not.

Native neighbours are one call; other operations run one by one, in torch or in Python.
"""

from collections import Counter
from dataclasses import dataclass
from typing import NamedTuple

from tandem.recording.program import NativeCall
from tandem.recording.recorded_graph import RecordedGraph

_PROFILE_RUNS = 5
_NAMED_OPERATIONS = 5  # the others are added up


@dataclass(frozen=True, slots=True)
class NotNative:
    """All calls of one operation that a step leaves to torch or Python."""

    operation: str
    calls: int
    milliseconds: float


class Coverage(NamedTuple):
    """One decode step, profiled."""

    num_calls: int
    """Of the step: native programs, and operations that are not native."""
    milliseconds: float
    """Of the step, operation by operation."""
    native: dict[str, int]
    """Native operations of each name."""
    not_native: list[NotNative]
    """The costliest first."""

    def line(self) -> str:
        """Return what is not native and what it costs, for people."""
        if not self.not_native:
            return "not native: nothing"
        named, rest = self.not_native[:_NAMED_OPERATIONS], self.not_native[_NAMED_OPERATIONS:]
        parts = [_part(o.operation, [o]) for o in named]
        parts += [_part(f"{len(rest)} more", rest)] if rest else []
        calls = sum(o.calls for o in self.not_native)
        milliseconds = sum(o.milliseconds for o in self.not_native)
        return (
            f"not native: {calls} of the {self.num_calls} calls of a decode step, "
            f"{milliseconds:.2f} of {self.milliseconds:.2f} ms: {', '.join(parts)}"
        )


def _part(name: str, operations: list[NotNative]) -> str:
    calls = sum(operation.calls for operation in operations)
    return f"{name} {calls} x ({sum(o.milliseconds for o in operations):.2f} ms)"


def coverage_of(recorded: RecordedGraph) -> Coverage:
    """Profile a step: does it again, with the inputs and the KV cache's positions of the last one.

    Call it only after a decode step, before anything else was computed.
    """
    native: Counter[str] = Counter()
    calls: Counter[str] = Counter()
    seconds: Counter[str] = Counter()
    total = 0.0
    for operation, taken in recorded.profile(_PROFILE_RUNS):
        total += taken
        if isinstance(operation.function, NativeCall):
            native[operation.name] += 1
        else:
            calls[operation.name] += 1
            seconds[operation.name] += taken  # type: ignore[assignment]
    not_native = [NotNative(name, calls[name], s * 1e3) for name, s in seconds.most_common()]
    return Coverage(recorded.num_calls, total * 1e3, dict(sorted(native.items())), not_native)
