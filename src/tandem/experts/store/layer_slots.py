"""Reads the experts of a layer that is on the disk: from a host slot, or from the disk into one."""

import ctypes
from dataclasses import dataclass

import torch

from tandem.experts.store.held_expert import Extent, HeldExpert
from tandem.kernels import _native


@dataclass(frozen=True, slots=True)
class LayerSlots:
    """Access to one layer's experts in a model's host slots."""

    native: _native.HostSlots
    number: int
    """The layer's index among the layers that have host slots."""
    expert_bytes: int

    def hold(self, expert: int) -> HeldExpert:
        """Hold an expert in its slot, or read it into a slot; waits until a slot is free.

        The calling thread must hold no other expert, except one that is released even if this call
        does not return; otherwise the call may wait forever.
        """
        return self._at(self.native.hold(self.number, expert))

    def try_hold(self, expert: int) -> HeldExpert | None:
        """Hold an expert without waiting for a slot; None if no slot is free now."""
        held = self.native.try_hold(self.number, expert)
        return None if held is None else self._at(held)

    def take_back(self, expert: int) -> HeldExpert | None:
        """Return a slot for the bytes of an expert that leaves a device; None if it gets no slot.

        The caller copies the bytes there and then calls `keep`; without it, `let_go` discards them.
        """
        held = self.native.take_back(self.number, expert)
        return None if held is None else self._at(held)

    def resident(self) -> list[int]:
        """Return the layer's experts that are in memory, ascending."""
        return self.native.resident(self.number)

    def _at(self, held: _native.HeldExpert) -> HeldExpert:
        memory = (ctypes.c_uint8 * self.expert_bytes).from_address(held.address())
        return HeldExpert([Extent(0, torch.frombuffer(memory, dtype=torch.uint8))], held)
