"""States on a GPU, at addresses that stay: convolutions and recurrences of captured steps.

A decode step goes through neighbouring slots; those without a token are idle in it, by their
position, and keep their states.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tandem.kernels.attention import Segment
from tandem.kernels.device_states import SlotTokens, StateKernels
from tandem.kernels.recurrent import Convolution, Recurrence, StateOperation
from tandem.kv_cache.cuda_layers import Zeros
from tandem.kv_cache.states import KeptStates, StateKey


@dataclass(eq=False)
class DeviceLayer:
    """An operation whose numbers lie as `StateKernels` reads them, with its states."""

    operation: StateOperation
    states: Tensor


class DeviceStates(KeptStates[DeviceLayer]):
    """States that kernels of a device advance."""

    def __init__(self, num_slots: int, kernels: StateKernels, zeros: Zeros) -> None:
        """Hold states of so many slots, in memory that `zeros` takes."""
        super().__init__(num_slots)
        self._kernels, self._zeros = kernels, zeros
        self._first_slot, self._num_each, self._count = 0, 1, num_slots
        self._positions = torch.empty(0, dtype=torch.int64, device="cpu")

    def begin_prompt(self, segment: Segment, positions: Tensor) -> None:
        """Announce a prompt's tokens, of one slot, with their positions on the device."""
        self.begin([segment])
        self._first_slot, self._num_each, self._count = segment.slot, segment.num_tokens, 1
        self._positions = positions

    def begin_decode(self, positions: Tensor, count: int) -> None:
        """Announce a token of each of the first slots; those that have none stand below 0."""
        self._cuts = []
        self._first_slot, self._num_each, self._count = 0, 1, count
        self._positions = positions

    def advance(
        self, key: StateKey, operation: Callable[[], StateOperation], inputs: Sequence[Tensor]
    ) -> Tensor:
        """Do a layer's operation, which is made on first use, for the tokens announced."""
        if key not in self._layers:
            with torch.inference_mode(False):
                self._layers[key] = self._new_layer(operation())
        layer = self._layers[key]
        if not self._cuts:
            tokens = SlotTokens(self._first_slot, self._num_each, self._positions[: self._count])
            return self._compute(layer, tokens, inputs)

        def compute(part: slice) -> Tensor:
            positions = self._positions[part.start : part.start + 1]
            some = SlotTokens(self._first_slot, part.stop - part.start, positions)
            return self._compute(layer, some, [x[part] for x in inputs])

        return self._with_cuts(layer, self._num_each, compute)

    def _compute(self, layer: DeviceLayer, tokens: SlotTokens, inputs: Sequence[Tensor]) -> Tensor:
        operation, states = layer.operation, layer.states
        if isinstance(operation, Convolution):
            return self._kernels.convolve(operation, states, tokens, *inputs)
        return self._kernels.recur(operation, states, tokens, *inputs)

    def _new_layer(self, operation: StateOperation) -> DeviceLayer:
        if isinstance(operation, Convolution):
            weight, bias, has_silu = operation
            channels, width = weight.shape
            ready = Convolution(_transposed(weight), _fp32(bias), has_silu)
            return DeviceLayer(ready, self._new_states(width - 1, channels))
        form, factor, skip = operation
        turned = None if factor is None else _transposed(factor)
        states = self._new_states(form.num_heads, form.key_dim, form.value_dim)
        return DeviceLayer(Recurrence(form, turned, _fp32(skip)), states)

    def _new_states(self, *shape: int) -> Tensor:
        return self._zeros((self._num_slots, *shape), torch.float32)


def _fp32(numbers: Tensor | None) -> Tensor | None:
    return None if numbers is None else numbers.detach().float().contiguous()


def _transposed(numbers: Tensor) -> Tensor:
    """Return a matrix in fp32 whose columns lie in one piece each."""
    return numbers.detach().float().t().contiguous().t()
