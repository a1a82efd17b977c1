"""Whether the host has memory for keys and values, before it is asked for."""

from tandem.core.errors import CapacityError
from tandem.core.units import format_bytes
from tandem.experts.store import host_memory


def require_room(needed: int, held: int, num_slots: int, capacity: int) -> None:
    """Raise `CapacityError` unless `needed` bytes fit in what is free and what is `held` of them.

    They are for so many slots of `capacity` tokens.
    """
    if needed - held > host_memory.available_bytes():
        raise no_room(needed, held, num_slots, capacity)


def no_room(num_bytes: int, held: int, num_slots: int, capacity: int) -> CapacityError:
    """Return the error for a KV cache that does not fit; arguments as of `require_room`."""
    available = host_memory.available_bytes() + held
    return CapacityError(
        f"a KV cache of {num_slots} slots of {capacity} tokens takes {format_bytes(num_bytes)} "
        f"and {format_bytes(available)} of host memory are free; use fewer prompts at once, "
        "shorter ones, a smaller max_new_tokens or kv_dtype='int8'"
    )
