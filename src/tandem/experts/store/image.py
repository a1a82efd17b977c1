"""One expert as the bytes of a slot: what is copied, and where it lies."""

from typing import NamedTuple

from torch import Tensor

# Sections start at multiples of this in a slot, as in the packed layout.
ALIGNMENT_BYTES = 64


class Extent(NamedTuple):
    """Bytes in host memory that belong at `offset` of a slot."""

    offset: int
    data: Tensor  # uint8, contiguous


def aligned(num_bytes: int) -> int:
    """Round up to the alignment of sections."""
    return -(-num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
