"""States on a GPU at fixed addresses, so that captured steps can advance them.

The padding tokens of a decode step form idle runs, which store no state (see `Run`).
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from tandem.devices.cuda.host_twin import on_its_way
from tandem.kernels.attention import Segment
from tandem.kernels.device_compression import compress_prompt, ring_shape
from tandem.kernels.device_states import (
    Run,
    SlotTokens,
    StateKernels,
    StateMemory,
    logged_values,
)
from tandem.kernels.recurrent import (
    MOST_DRAFTED,
    Compression,
    Convolution,
    Recurrence,
    StateOperation,
)
from tandem.kv_cache.cuda.layers import StepPlaces
from tandem.kv_cache.index_keys import Zeros
from tandem.kv_cache.states import KeptStates, StateKey


@dataclass(eq=False)
class DeviceLayer:
    """An operation with its weights in `StateKernels`' layout, and its states."""

    operation: StateOperation
    memory: StateMemory

    @property
    def states(self) -> Tensor:
        """(slots, ...) fp32."""
        return self.memory.states


class _Part(NamedTuple):
    """Tokens of a forward over which one call advances states."""

    tokens: SlotTokens
    places: StepPlaces | Segment
    """The slots and positions of a step's tokens, or the segment of a prompt."""


class DeviceStates(KeptStates[DeviceLayer]):
    """States on a GPU, which `StateKernels` advance."""

    def __init__(
        self, num_slots: int, kernels: StateKernels, zeros: Zeros, device: torch.device
    ) -> None:
        """Hold states for `num_slots` slots; `zeros` allocates them when the model uses a layer."""
        super().__init__(num_slots)
        self._kernels, self._zeros, self._device = kernels, zeros, device
        self._half = [0] * num_slots  # of a slot's log, that is read next
        self._parts: list[_Part] = []
        self.have_log = True
        """Whether the announced step logs drafted tokens, or advances states over logged tokens."""

    def _of(self, layer: DeviceLayer) -> tuple[Tensor, ...]:
        return layer.memory

    def begin_prompt(self, segment: Segment) -> None:
        """Announce the tokens of a prompt in one slot; split them where checkpoints are left."""
        run = self._run(segment, 0, segment.num_tokens)
        self.begin([segment])
        ends = [*(cut.token for cut in self._cuts), segment.num_tokens]
        self._parts, first = [], 0
        for end in ends:
            part = run._replace(num_tokens=end - first, num_certain=end - first)
            part = part if first == 0 else part._replace(num_again=0)
            runs = on_its_way([part], self._device).to(self._device, non_blocking=True)
            tokens = SlotTokens(runs, part.num_tokens, part.num_again > 0)
            place = Segment(segment.slot, segment.first_position + first, part.num_tokens)
            self._parts.append(_Part(tokens, place))
            first = end

    def begin_decode(self, segments: Sequence[Segment], places: StepPlaces) -> list[Run]:
        """Announce a step's tokens, slot by slot; padding tokens fill the rest of `places`.

        Returns the runs, which the caller must pass to `places.upload`; a captured step reads them
        there. All but the first token of a slot may be taken back. Raises `ValueError` for too many
        tokens of one slot.
        """
        runs = places.runs
        found, row = [], 0
        for segment in segments:
            if segment.num_tokens > 1 + MOST_DRAFTED:
                raise ValueError(f"{segment.num_tokens} tokens of a slot, expected up to 8")
            found.append(self._run(segment, row, 1))
            row += segment.num_tokens
        self.begin_step(segments)
        most = max(run.num_tokens for run in found)
        self.have_log = most > 1 or any(run.num_again > 0 for run in found)
        self.have_log |= self._kernels.loops_on_device
        most = min(len(runs), 1 + MOST_DRAFTED) if self.have_log else 1
        self._parts = [_Part(SlotTokens(runs, most, self.have_log), places)]
        idle = found[0]._replace(num_tokens=1, num_certain=0, num_again=-1)
        found += [idle._replace(first=at) for at in range(row, len(runs))]
        return found + [idle._replace(num_tokens=0)] * (len(runs) - len(found))

    def advance(
        self, key: StateKey, operation: Callable[[], StateOperation], inputs: Sequence[Tensor]
    ) -> Tensor:
        """Run a layer's operation for the announced tokens; the layer is created on first use."""
        if key not in self._layers:
            with torch.inference_mode(False):
                self._layers[key] = self._new_layer(operation())
        layer, parts = self._layers[key], iter(self._parts)

        def compute(part: slice) -> Tensor:
            return self._compute(layer, next(parts), [x[part] for x in inputs])

        if not self._cuts:
            return self._compute(layer, next(parts), inputs)
        return self._with_cuts(layer, len(inputs[0]), compute)

    def commit(self) -> None:
        """Keep the checkpoints and logs of the completed forward."""
        for segment in self._announced:
            if segment.num_tokens > 1:
                self._half[segment.slot] = 1 - self._half[segment.slot]
        super().commit()

    def save(self, slots: Iterable[int]) -> Callable[[], None]:
        """Copy the states of some slots; return a function that restores them."""
        half = {slot: self._half[slot] for slot in slots}
        states = super().save(half)

        def put_back() -> None:
            for slot, number in half.items():
                self._half[slot] = number
            states()

        return put_back

    def _copy(self, source: int, target: int) -> None:
        super()._copy(source, target)
        self._half[target] = self._half[source]

    def _compute(self, layer: DeviceLayer, part: _Part, inputs: Sequence[Tensor]) -> Tensor:
        operation, memory, (tokens, places) = layer.operation, layer.memory, part
        if isinstance(operation, Compression):
            if isinstance(places, Segment):
                ring = memory.states[places.slot]
                return compress_prompt(operation, ring, places.first_position, *inputs)
            where = (places.slots, places.positions)
            return self._kernels.compress(operation, memory.states, *where, *inputs)
        if isinstance(operation, Convolution):
            return self._kernels.convolve(operation, memory, tokens, *inputs)
        return self._kernels.recur(operation, memory, tokens, *inputs)

    def _run(self, segment: Segment, row: int, num_certain: int) -> Run:
        slot, first, count = segment
        again = self._drafted[slot] if first else -1
        return Run(slot, row, count, num_certain, again, self._half[slot])

    def _new_layer(self, operation: StateOperation) -> DeviceLayer:
        if isinstance(operation, Convolution):
            weight, bias, has_silu = operation
            channels, width = weight.shape
            ready: StateOperation = Convolution(_transposed(weight), _fp32(bias), has_silu)
            shape: tuple[int, ...] = (width - 1, channels)
        elif isinstance(operation, Compression):
            ready = operation._replace(bias=operation.bias.detach().float().contiguous())
            shape = ring_shape(operation)
        else:
            form, factor, skip = operation
            turned = None if factor is None else _transposed(factor)
            ready = Recurrence(form, turned, _fp32(skip))
            shape = (form.num_heads, form.key_dim, form.value_dim)
        log = self._new((2, MOST_DRAFTED, logged_values(operation)))
        return DeviceLayer(ready, StateMemory(self._new(shape), log))

    def _new(self, shape: tuple[int, ...]) -> Tensor:
        return self._zeros((self._num_slots, *shape), torch.float32)


def _fp32(numbers: Tensor | None) -> Tensor | None:
    return None if numbers is None else numbers.detach().float().contiguous()


def _transposed(numbers: Tensor) -> Tensor:
    """Return a matrix in fp32 with contiguous columns."""
    return numbers.detach().float().t().contiguous().t()
