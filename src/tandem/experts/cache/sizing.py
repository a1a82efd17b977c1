"""How many slots fit: from what a user allows and what the device has. Arithmetic on bytes only."""

from tandem.core.errors import CapacityError
from tandem.core.units import format_bytes
from tandem.experts.cache.memory_share import MemoryShare
from tandem.experts.execution.device import DeviceMemory

# Of the free memory, "auto" leaves this share alone: other programs, and what the device's driver
# and the framework take for themselves.
AUTO_MARGIN = 0.10


def budget_bytes(share: MemoryShare, memory: DeviceMemory) -> int:
    """Return the bytes that Tandem may use; `CapacityError` if the device has fewer."""
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
    """Return how many slots the budget has room for; never more than the model has experts.

    `reserved_bytes` of the budget are for dense parts, KV cache and workspace. `CapacityError` if
    not one slot fits.
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
