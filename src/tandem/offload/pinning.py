"""Pins the host store after it is filled, chunk by chunk, as far as the device and the system let.

Copies from pinned memory are faster and do not hold the CPU up; without it all works, slower.
"""

import warnings
from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from tandem.core.units import format_bytes
from tandem.offload.host_store import HostStore


class Pinned(NamedTuple):
    """How much of a store is pinned."""

    num_bytes: int
    total_bytes: int


def pin_store(store: HostStore, pin: Callable[[Tensor], bool]) -> Pinned:
    """Pin chunks in order until `pin` takes no more, and say loudly if some are left."""
    chunks = [tensor for layer in store for tensor in layer.stored().values()]
    total = sum(chunk.nbytes for chunk in chunks)
    done = 0
    for chunk in chunks:
        if not pin(chunk):
            break
        done += chunk.nbytes
    if done < total:
        warnings.warn(
            f"only {format_bytes(done)} of {format_bytes(total)} of experts could be pinned; "
            "copies of the others are slower. Raise the limit on locked memory (ulimit -l)",
            stacklevel=2,
        )
    return Pinned(done, total)
