"""Compares planned with measured memory, and describes what was wrong."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

TOLERANCE = 0.05
# Kept per sequence and not planned: logs of drafted tokens, beside linear attention's states.
_KEPT_TOLERANCE = 0.1
_LEAST_BYTES = 1 << 20  # a smaller difference does not count


@dataclass(frozen=True, slots=True)
class Planned:
    """The plan's numbers, in bytes."""

    fits: bool
    host: int
    """Host memory, including the slots of an emulated device."""
    program: int
    experts: int
    dense: int
    kept: int
    """Keys, values and states of all sequences."""
    draft: int
    """A draft model with its keys and values."""
    num_experts: int
    device_slots: int
    slots_over_disk: int | None


@dataclass(frozen=True, slots=True)
class Taken:
    """The measured numbers; names as in `Planned`."""

    peak: int
    """The process's peak memory."""
    experts: int
    dense: int
    kept: int
    draft: int
    device_slots: int
    slots_over_disk: int | None
    speed_ratio: float | None = None
    """Forecast decode speed relative to the measured one; None: not measured, or no forecast."""


class Difference(NamedTuple):
    """A part whose planned and measured bytes differ."""

    part: str
    planned: float
    taken: float

    @property
    def text(self) -> str:
        """The difference in words."""
        return f"{self.part}: planned {self.planned:,.0f}, taken {self.taken:,.0f}"


def differences(planned: Planned, taken: Taken) -> Iterator[Difference]:
    """Yield the parts that took more than planned, or less by 5 % and a megabyte."""
    tolerances = dict.fromkeys(("experts", "dense", "draft"), TOLERANCE)
    tolerances["kept"] = _KEPT_TOLERANCE
    for part, tolerance in tolerances.items():
        expected, found = getattr(planned, part), getattr(taken, part)
        if abs(expected - found) > max(tolerance * found, _LEAST_BYTES):
            yield Difference(part, expected, found)
    if planned.slots_over_disk != taken.slots_over_disk:
        yield Difference("slots", planned.slots_over_disk or 0, taken.slots_over_disk or 0)
    # If all experts are resident, a device has a slot or two more, for exchanges.
    if planned.device_slots != min(taken.device_slots, planned.num_experts):
        yield Difference("slots on the device", planned.device_slots, taken.device_slots)


def memory_ratio(planned: Planned, taken: Taken) -> float:
    """Return the planned over the measured peak memory."""
    return planned.host / taken.peak
