"""Where a layer whose experts lie on the disk is read from: slots in memory, or the disk now."""

import ctypes
from dataclasses import dataclass

import torch

from tandem.experts.store.held_expert import Extent, HeldExpert
from tandem.kernels import _native


@dataclass(frozen=True, slots=True)
class LayerSlots:
    """A layer's part of the slots that a model has in memory."""

    native: _native.HostSlots
    number: int
    """The layer's, among those that have slots."""
    expert_bytes: int

    def hold(self, expert: int) -> HeldExpert:
        """Hold an expert where it is, or where it is read to; waits until there is room.

        For a thread that holds no other, or lets go of the others without this one.
        """
        return self._at(self.native.hold(self.number, expert))

    def try_hold(self, expert: int) -> HeldExpert | None:
        """Do the same without a wait; None: there is no room now."""
        held = self.native.try_hold(self.number, expert)
        return None if held is None else self._at(held)

    def take_back(self, expert: int) -> HeldExpert | None:
        """Return room for the bytes of an expert that leaves a device; None: it is not worth that.

        `keep` it once they have come; what is only let go of is forgotten.
        """
        held = self.native.take_back(self.number, expert)
        return None if held is None else self._at(held)

    def resident(self) -> list[int]:
        """Return the layer's experts that are in memory, ascending."""
        return self.native.resident(self.number)

    def _at(self, held: _native.HeldExpert) -> HeldExpert:
        memory = (ctypes.c_uint8 * self.expert_bytes).from_address(held.address())
        return HeldExpert([Extent(0, torch.frombuffer(memory, dtype=torch.uint8))], held)
