"""How much of a device's memory Tandem may use, and how many slots fit in it; without torch."""

import dataclasses
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from tandem.core.errors import CapacityError, ConfigError
from tandem.core.units import format_bytes, parse_bytes

# Share of the free memory that "auto" leaves to other programs, the device's driver and the
# framework.
AUTO_MARGIN = 0.10


class OutOfDeviceMemoryError(CapacityError):
    """The device lacks memory for slots or for a batch's workspace; callers shrink the cache."""


class DeviceMemory(NamedTuple):
    """A device's total and free memory."""

    total_bytes: int
    free_bytes: int


@dataclasses.dataclass(frozen=True, slots=True)
class MemoryShare:
    """How much device memory Tandem may use; both fields None: the free memory less a margin."""

    num_bytes: int | None = None
    fraction: float | None = None


def parse_gpu_memory(value: object) -> MemoryShare:
    """Parse "8GiB", a number of bytes, "0.5" (a fraction of the memory), "50%" or "auto".

    Raises `ConfigError` for other values.
    """
    text = str(value).strip()
    if text == "auto":
        return MemoryShare()
    expected = "expected a size such as 8GiB, a fraction such as 0.5, or auto"
    if isinstance(value, float) or _is_fraction(text):
        fraction = float(text.rstrip("%")) / (100.0 if text.endswith("%") else 1.0)
        if not 0.0 < fraction <= 1.0:
            raise ConfigError(f"gpu_memory is {value!r}; {expected}")
        return MemoryShare(fraction=fraction)
    try:
        return MemoryShare(num_bytes=parse_bytes(text, name="gpu_memory"))
    except ConfigError:
        raise ConfigError(f"gpu_memory is {value!r}; {expected}") from None


def _is_fraction(text: str) -> bool:
    number = text.rstrip("%")
    if not (text.endswith("%") or "." in text):
        return False
    try:
        float(number)
    except ValueError:
        return False
    return True


def budget_bytes(share: MemoryShare, memory: DeviceMemory) -> int:
    """Return the bytes that Tandem may use; `CapacityError` if the device has fewer in total."""
    if share.num_bytes is not None:
        if share.num_bytes > memory.total_bytes:
            raise CapacityError(
                f"gpu_memory is {format_bytes(share.num_bytes)} and the device has "
                f"{format_bytes(memory.total_bytes)}; give at most that, or auto"
            )
        return share.num_bytes
    if share.fraction is not None:
        return int(share.fraction * memory.total_bytes)
    return int((1.0 - AUTO_MARGIN) * memory.free_bytes)


def count_slots(
    share: MemoryShare,
    memory: DeviceMemory,
    *,
    slot_bytes: int,
    num_experts: int,
    reserved_bytes: int = 0,
) -> int:
    """Return how many slots fit in the budget, at most one per expert.

    `reserved_bytes` of the budget are for dense parts, KV cache and workspace. Raises
    `CapacityError` if no slot fits.
    """
    budget = budget_bytes(share, memory)
    count = (budget - reserved_bytes) // slot_bytes
    if count < 1:
        kept = f" after {format_bytes(reserved_bytes)} for the rest" if reserved_bytes else ""
        raise CapacityError(
            f"gpu_memory gives {format_bytes(budget)}{kept}, and one expert takes "
            f"{format_bytes(slot_bytes)}; give at least {format_bytes(reserved_bytes + slot_bytes)}"
            " or run with device cpu"
        )
    return min(count, num_experts)


def require_whole(
    share: MemoryShare,
    memory: DeviceMemory,
    parts: Mapping[str, int],
    smaller: Iterable[tuple[str, int]] = (),
) -> int:
    """Return the budget in bytes if it holds the whole dense model; else raises `CapacityError`.

    `parts` has the bytes of each part on the device, by the part's name in the message. `smaller`
    has (option, total bytes) of options that need less, the largest first, for the message.
    """
    needed, budget = sum(parts.values()), budget_bytes(share, memory)
    room = min(budget, memory.free_bytes)
    if needed <= room:
        return budget
    named = ", ".join(f"{name} {format_bytes(size)}" for name, size in parts.items() if size)
    fitting = (f"{how} takes {format_bytes(size)}" for how, size in smaller if size <= room)
    raise CapacityError(
        f"the model takes {format_bytes(needed)} of the GPU's memory ({named}), and there are "
        f"{format_bytes(room)} for it (gpu_memory; {format_bytes(memory.free_bytes)} are free); a "
        "dense model has no experts to keep elsewhere: "
        f"{next(fitting, 'give it more memory')}, or run with device cpu"
    )
