"""An expert's bytes in host memory, which stay in place while they are read or copied."""

from typing import NamedTuple

from torch import Tensor

from tandem.kernels import _native


class Extent(NamedTuple):
    """Bytes of an expert in host memory that belong at `offset` of a slot."""

    offset: int
    data: Tensor  # uint8, contiguous


class HeldExpert:
    """An expert whose bytes stay in place until `let_go`; entering a `with` body waits for them.

    An expert without a host slot is in memory permanently.
    """

    __slots__ = ("_slot", "extents")

    def __init__(self, extents: list[Extent], slot: _native.HeldExpert | None = None) -> None:
        """Hold the bytes at `extents`; with a `slot`, they may still be arriving from a disk."""
        self.extents, self._slot = extents, slot

    def has_come(self) -> bool:
        """Tell whether the bytes are in memory, so that `wait` would return at once."""
        return self._slot is None or self._slot.has_come()

    def wait(self) -> None:
        """Wait until the bytes are in memory; raises `ModelError` if they cannot be read."""
        if self._slot is not None:
            self._slot.wait()

    def keep(self) -> None:
        """Offer an expert that was taken back from a device to the host slots' eviction policy.

        Must be called only once the expert's bytes have arrived. The policy may refuse the expert.
        """
        if self._slot is not None:
            self._slot.keep()

    def let_go(self) -> None:
        """Release the slot. May be called twice."""
        if self._slot is not None:
            self._slot.let_go()

    def __enter__(self) -> list[Extent]:
        try:
            self.wait()
        except BaseException:
            self.let_go()
            raise
        return self.extents

    def __exit__(self, *error: object) -> None:
        self.let_go()
