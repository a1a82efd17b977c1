"""Where a layer whose experts lie on the disk is read from: slots in memory, or the disk now."""

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from tandem.kernels import _native


@dataclass(frozen=True, slots=True)
class LayerSlots:
    """A layer's part of the slots that a model has in memory."""

    native: _native.HostSlots
    number: int
    """The layer's, among those that have slots."""
    expert_bytes: int

    @contextmanager
    def held(self, expert: int) -> Iterator[Tensor]:
        """Return an expert's bytes, which stay inside; raises as `held_address`."""
        with self.held_address(expert) as address:
            memory = (ctypes.c_uint8 * self.expert_bytes).from_address(address)
            yield torch.frombuffer(memory, dtype=torch.uint8)

    @contextmanager
    def held_address(self, expert: int) -> Iterator[int]:
        """Return where an expert's bytes are and stay inside; waits for the disk if they must come.

        Raises `ModelError` if they cannot be read. A thread holds one at a time.
        """
        address = self.native.hold(self.number, expert)
        try:
            yield address
        finally:
            self.native.let_go(self.number, expert, address)
