"""Pins the host store after it is filled, layer by layer, as far as device and system allow.

Copies from pinned memory are faster and do not block the CPU; without pinned memory everything
works, but slower.

A layer in ordinary memory is pinned in place. A layer in a mapped file (a packed checkpoint) is
first copied to ordinary memory, if enough is free: not every system can pin a file's pages, and a
system that can copies them anyway. A layer that the driver refuses, because it shares pages with
other memory, is also copied. The first layer that cannot be pinned either way ends the attempt. For
experts on a disk the host slots are pinned, layer by layer; their memory then stays allocated.
"""

import mmap
import warnings
from collections.abc import Callable, Sequence
from typing import NamedTuple

from torch import Tensor

from tandem.core.units import format_bytes
from tandem.experts.store.host_memory import available_bytes
from tandem.experts.store.host_store import HostLayer, HostStore
from tandem.hardware.windows import wsl_version
from tandem.kernels.memory import allocate

# Left to other programs when experts are copied out of their files.
KEPT_FREE_BYTES = 1 << 30

Pin = Callable[[Tensor], bool]


class Pinned(NamedTuple):
    """How much of a store is pinned."""

    num_bytes: int
    total_bytes: int
    moved_bytes: int = 0
    """Bytes that were first copied out of mapped files, or off pages shared with other data."""
    why_not_all: str | None = None


def pin_store(
    store: HostStore,
    pin: Pin,
    *,
    is_mapped: Callable[[Tensor], bool] = lambda tensor: False,
    free_bytes: Callable[[], int] = available_bytes,
) -> Pinned:
    """Pin layers in order until one cannot be pinned; warn if some are left unpinned.

    `is_mapped` tells whether a tensor is in a mapped file.
    """
    total = sum(_stored_bytes(layer) for layer in store)
    done = moved = 0
    why: str | None = None
    for layer in store:
        if any(is_mapped(tensor) for tensor in layer.stored().values()):
            free = free_bytes()
            if _stored_bytes(layer) + KEPT_FREE_BYTES > free:
                why = (
                    f"they lie in mapped files, and {format_bytes(free)} of host memory are too "
                    "few to copy them out; close other programs"
                )
                break
            moved += _move(layer)
        pinned = _pin_layer(layer, pin)
        if pinned == 0:
            moved += _move(layer)
            pinned = _pin_layer(layer, pin)
        done += pinned
        if pinned < _stored_bytes(layer):
            why = _no_more_pinned()
            break
    return _reported(Pinned(done, total, moved, why))


def pin_slots(slabs: Sequence[Tensor], pin: Pin) -> Pinned:
    """Pin host slots' memory, tensor by tensor, until one cannot be pinned; warn in that case."""
    done = 0
    for slab in slabs:
        if slab.nbytes > 0 and not pin(slab):
            break
        done += slab.nbytes
    total = sum(slab.nbytes for slab in slabs)
    return _reported(Pinned(done, total, why_not_all=None if done == total else _no_more_pinned()))


def _reported(pinned: Pinned) -> Pinned:
    if pinned.why_not_all is not None:
        warnings.warn(
            f"only {format_bytes(pinned.num_bytes)} of {format_bytes(pinned.total_bytes)} of "
            "experts could be pinned, and copies of the others are slower: "
            f"{pinned.why_not_all}",
            stacklevel=3,
        )
    return pinned


def _no_more_pinned() -> str:
    if wsl_version() is None:
        return "the system allows no more pinned memory; raise the limit (ulimit -l)"
    return "Windows allows WSL2 no more pinned memory; keep more experts on the GPU (--gpu-memory)"


def _pin_layer(layer: HostLayer, pin: Pin) -> int:
    """Pin a layer's tensors in order until one cannot be pinned; return the number of bytes."""
    done = 0
    for tensor in layer.stored().values():
        if not pin(tensor):
            break
        done += tensor.nbytes
    return done


def _move(layer: HostLayer) -> int:
    """Move a layer to new memory, on pages without other data; return the number of bytes."""
    layer.move_to({name: _on_own_pages(tensor) for name, tensor in layer.stored().items()})
    return _stored_bytes(layer)


def _stored_bytes(layer: HostLayer) -> int:
    return sum(tensor.nbytes for tensor in layer.stored().values())


def _on_own_pages(tensor: Tensor) -> Tensor:
    """Return a copy of `tensor` in new memory that shares no memory page with other data."""
    page = mmap.PAGESIZE
    memory = allocate(-(-tensor.nbytes // page) * page + page)
    begin = -memory.data_ptr() % page
    own = memory[begin : begin + tensor.nbytes]
    return own.view(tensor.dtype).view(tensor.shape).copy_(tensor)
