"""Loads packed models with slots in memory for a part of their experts."""

from pathlib import Path
from typing import Any

import tandem
from tandem.experts.cache.host_slots import HostSlots
from tests.inside import runtime_in


def slots_of(model: Any) -> HostSlots:
    slots = runtime_in(model).host_slots
    assert isinstance(slots, HostSlots)
    return slots


def with_share(packed: Path, share: float, **options: Any) -> Any:
    """Load the model with slots for a share of its experts."""
    least = slots_of(tandem.load(packed, expert_memory="1GB"))
    experts = least.num_bytes - least.transit_bytes
    size = least.transit_bytes + int(share * experts) + 1
    return tandem.load(packed, expert_memory=str(size), **options)
