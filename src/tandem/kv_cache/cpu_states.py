"""States on the CPU, with logs of drafted tokens; states can be moved out and in as bytes."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from tandem.kernels.dense import CpuThreads
from tandem.kernels.recurrent import LayerState, StateOperation, StateTokens, new_layer_state
from tandem.kv_cache.states import KeptStates, StateKey


class CpuStates(KeptStates[LayerState]):
    """States in host memory, which native kernels advance."""

    def __init__(self, num_slots: int) -> None:
        """Hold states for `num_slots` slots; layers are added when the model uses them."""
        super().__init__(num_slots)
        # Slots that have tokens from outside, but not yet their states.
        self._lost: set[int] = set()
        self._kept: list[Any] = []  # each layer's `kept` as a numpy array

    def _of(self, layer: LayerState) -> tuple[Tensor, ...]:
        return layer.states, layer.kept, layer.log

    def layer(self, key: StateKey, operation: Callable[[], StateOperation]) -> LayerState:
        """Return the operation and all slots' states of `key`; create them on first use."""
        if key not in self._layers:
            self._layers[key] = new_layer_state(self._num_slots, operation())
            self._kept.append(self._layers[key].kept.numpy())
        return self._layers[key]

    def advance(
        self, threads: CpuThreads, layer: LayerState, tokens: StateTokens, inputs: Sequence[Tensor]
    ) -> Tensor:
        """Run a layer's operation for the announced tokens; return its outputs."""
        if not self._cuts:
            return layer(threads, tokens, inputs)

        def compute(part: slice) -> Tensor:
            some = StateTokens(tokens.slots[part], tokens.positions[part])
            return layer(threads, some, [x[part] for x in inputs])

        return self._with_cuts(layer, len(tokens.slots), compute)

    def can_take_back(self, slot: int, num_tokens: int) -> bool:
        """Tell whether a slot's last `num_tokens` tokens were drafted in its last step.

        False from `lose` until the slot's states are set again.
        """
        return super().can_take_back(slot, num_tokens) and slot not in self._lost

    def _keep_drafted(self, slot: int, num_tokens: int) -> None:
        super()._keep_drafted(slot, num_tokens)
        for kept in self._kept:
            kept[slot] = num_tokens

    def _restore(self, source: int, target: int, length: int) -> None:
        super()._restore(source, target, length)
        self._lost.discard(target)

    def _copy(self, source: int, target: int) -> None:
        super()._copy(source, target)
        self._lost.discard(target)

    # ---- moving ----------------------------------------------------------------------------------

    def keep_every(self, num_tokens: int) -> None:
        """Make later prefills leave checkpoints at all multiples of `num_tokens` tokens as well."""
        self._every = num_tokens

    def lose(self, slot: int, length: int) -> None:
        """Drop a slot's checkpoints of more than `length` tokens, and consider its states lost.

        `put_in` must set the states before the slot's next step.
        """
        self._checkpoints.copy(slot, slot, length)
        self._keep_drafted(slot, 0)
        self._lost.add(slot)

    @torch.inference_mode()
    def take_out(self, slot: int, length: int) -> memoryview | None:
        """Return a slot's checkpoint at exactly `length` tokens as bytes; None: there is none."""
        kept = self._checkpoints.longest(slot, length)
        if kept is None or kept.length != length:
            return None
        copied = torch.cat([state.flatten().view(torch.uint8) for state in kept.states])
        return copied.numpy().data

    @torch.inference_mode()
    def put_in(self, slot: int, length: int, data: memoryview) -> None:
        """Set a slot's states to what `take_out` returned; keep them as a checkpoint at `length`.

        Raises `ValueError` if the number of bytes differs from the states'.
        """
        own = [layer.states[slot] for layer in self._layers.values()]
        pieces = pieces_of(data, [state.nbytes for state in own])
        states = []
        for state, piece in zip(own, pieces, strict=True):
            states.append(piece.clone().view(state.dtype).view(state.shape))
            state.copy_(states[-1])
        self._lost.discard(slot)
        self._checkpoints.add(slot, length, states)
        self._checkpoints.thin(self._budget)


def pieces_of(data: memoryview, sizes: Sequence[int]) -> Sequence[Tensor]:
    """Split bytes from a file or another slot into uint8 tensors of the given sizes.

    Raises `ValueError` if the sizes do not add up to the number of bytes.
    """
    if len(data) != sum(sizes):
        raise ValueError(f"{len(data)} bytes of keys, values or states, expected {sum(sizes)}")
    pieces: Sequence[Tensor] = torch.frombuffer(data, dtype=torch.uint8).split(list(sizes))
    return pieces
