"""States beside keys and values: what convolutions and linear attention keep of each sequence.

A conversation that goes on, branches or is edited begins again at the longest checkpoint that fits.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tandem.experts.store import host_memory
from tandem.kernels.attention import Segment
from tandem.kernels.dense import CpuThreads
from tandem.kernels.recurrent import MOST_DRAFTED, LayerState, StateTokens
from tandem.kv_cache.checkpoints import KeptCheckpoints, cut_lengths

_MOST_BYTES = 1 << 30  # of the checkpoints of all slots
_MOST_SHARE = 1 / 8  # of the memory that is free


class StateKey(NamedTuple):
    """Which state of a model."""

    layer: int
    kind: str
    """"convolution" or "recurrence", or what else of a layer that keeps more."""
    number: int
    """Of a layer that has several."""


class StateHandle(NamedTuple):
    """Stands for a state while a model's code carries it from its cache to an operation."""

    cache: Any
    layer: int
    number: int

    def to(self, *args: object, **kwargs: object) -> "StateHandle":
        """Return itself: what a model does to the tensor that it takes this for."""
        return self


@dataclass
class _Cut:
    """Where a forward leaves a checkpoint: between two of its tokens."""

    slot: int
    token: int
    length: int
    states: list[Tensor] = field(default_factory=list)


class StateStore:
    """The states of a model's layers by slot, and checkpoints of them."""

    def __init__(self, num_slots: int) -> None:
        """Hold states of so many slots; layers come as the model asks for them."""
        self._num_slots = num_slots
        self._layers: dict[StateKey, LayerState] = {}
        self._checkpoints = KeptCheckpoints(num_slots)
        self._cuts: list[_Cut] = []
        self._every = 0
        self._lost: set[int] = set()  # slots whose tokens were put in, and their states not yet
        self._drafted = [0] * num_slots
        self._kept: list[Any] = []  # what each layer's `kept` shares with numpy
        self._announced: list[Segment] = []
        self._budget = most_checkpoint_bytes(host_memory.available_bytes())

    def __bool__(self) -> bool:
        """Tell whether the model has states, as far as it was run."""
        return bool(self._layers)

    @property
    def num_bytes(self) -> int:
        """Bytes of the states and of their checkpoints."""
        kept = self._checkpoints.num_bytes
        return kept + sum(x.states.nbytes + x.log.nbytes for x in self._layers.values())

    @property
    def step_bytes(self) -> int:
        """Bytes of one slot's states, which a decode step reads and writes."""
        return sum(layer.states[0].nbytes for layer in self._layers.values())

    def layer(self, key: StateKey, new: Callable[[int], LayerState]) -> LayerState:
        """Return a state's operation, which `new` makes for all slots on first use."""
        if key not in self._layers:
            self._layers[key] = new(self._num_slots)
            self._kept.append(self._layers[key].kept.numpy())
        return self._layers[key]

    def begin(self, segments: Iterable[Segment]) -> None:
        """Announce a prompt's tokens, of which some will be followed by a checkpoint; or none."""
        self._cuts, self._announced = [], []
        first = 0
        for segment in segments:
            self._drafted[segment.slot] = 0  # what was kept of them is done before these tokens
            begin, slot = segment.first_position, segment.slot
            newest = self._checkpoints.newest(slot)
            end = begin + segment.num_tokens
            for length in cut_lengths(begin, end, newest, self._every)[-self._most() :]:
                self._cuts.append(_Cut(slot, first + length - begin, length))
            first += segment.num_tokens

    def begin_decode(self, segments: Sequence[Segment]) -> None:
        """Announce a decode step's tokens: all but the first of a slot may be taken back."""
        self._cuts, self._announced = [], list(segments)
        for segment in segments:
            assert not self or segment.num_tokens <= 1 + MOST_DRAFTED
            self._drafted[segment.slot] = 0

    def advance(
        self, threads: CpuThreads, layer: LayerState, tokens: StateTokens, inputs: Sequence[Tensor]
    ) -> Tensor:
        """Do a layer's operation for the tokens that are announced."""
        outputs, first = [], 0
        for cut in self._cuts:
            outputs.append(_part(threads, layer, tokens, inputs, slice(first, cut.token)))
            cut.states.append(layer.states[cut.slot].clone())
            first = cut.token
        if not outputs:
            return layer(threads, tokens, inputs)
        if first < len(tokens.slots):
            outputs.append(_part(threads, layer, tokens, inputs, slice(first, None)))
        return torch.cat(outputs)

    def commit(self) -> None:
        """Keep the checkpoints of the forward that is through."""
        for cut in self._cuts:
            if cut.states and len(cut.states) == len(self._layers):
                self._checkpoints.add(cut.slot, cut.length, cut.states)
        for segment in self._announced:
            if segment.num_tokens > 1:
                self._keep_drafted(segment.slot, segment.num_tokens - 1)
        self._cuts, self._announced = [], []
        self._checkpoints.thin(self._budget)

    def can_take_back(self, slot: int, num_tokens: int) -> bool:
        """Whether a slot's last tokens, if any, were drafted in its last step."""
        return num_tokens <= self._drafted[slot] and slot not in self._lost

    def _keep_drafted(self, slot: int, num_tokens: int) -> None:
        """Let a slot's next call do so many of its drafted tokens again."""
        self._drafted[slot] = num_tokens
        for kept in self._kept:
            kept[slot] = num_tokens

    def save(self, slots: Iterable[int]) -> Callable[[], None]:
        """Copy the states of some slots; return what puts them back."""
        numbers = set(slots)
        saved = [
            (tensor, slot, tensor[slot].clone())
            for layer in self._layers.values()
            for tensor in (layer.states, layer.kept, layer.log)
            for slot in numbers
        ]
        drafted = {slot: self._drafted[slot] for slot in numbers}

        def put_back() -> None:
            for slot, count in drafted.items():
                self._drafted[slot] = count
            for tensor, slot, copy in saved:
                tensor[slot] = copy

        return put_back

    # ---- moving ----------------------------------------------------------------------------------

    def keep_every(self, num_tokens: int) -> None:
        """Leave a checkpoint at every multiple of so many tokens of prompts, too."""
        self._every = num_tokens

    def lose(self, slot: int, length: int) -> None:
        """Let a slot go on from so many tokens without their states, which are put in later."""
        self._checkpoints.copy(slot, slot, length)
        self._keep_drafted(slot, 0)
        self._lost.add(slot)

    @torch.inference_mode()
    def take_out(self, slot: int, length: int) -> memoryview | None:
        """Return a copy of a slot's states after so many tokens; None: there is no checkpoint."""
        kept = self._checkpoints.longest(slot, length)
        if kept is None or kept.length != length:
            return None
        copied = torch.cat([state.flatten().view(torch.uint8) for state in kept.states])
        return copied.numpy().data

    @torch.inference_mode()
    def put_in(self, slot: int, length: int, data: memoryview) -> None:
        """Let a slot stand where `take_out` has stood; a checkpoint there is kept, too."""
        source = torch.frombuffer(data, dtype=torch.uint8)
        states, begin = [], 0
        for layer in self._layers.values():
            own = layer.states[slot]
            part = source[begin : begin + own.nbytes].clone()
            states.append(part.view(own.dtype).view(own.shape))
            layer.states[slot] = states[-1]
            begin += own.nbytes
        assert begin == len(data)
        self._lost.discard(slot)
        self._checkpoints.add(slot, length, states)
        self._checkpoints.thin(self._budget)

    # ---- going back ------------------------------------------------------------------------------

    def best_length(self, slot: int, length: int) -> int:
        """Return the greatest length up to `length` that a checkpoint of a slot has, or 0."""
        longest = self._checkpoints.longest(slot, length)
        return longest.length if longest else 0

    def go_back(self, source: int, target: int, length: int, num_less: int) -> None:
        """Let `target` stand where `source` stood `num_less` tokens ago, at a usable length."""
        if not self.can_take_back(source, num_less):
            self._restore(source, target, length)
            return
        if source != target:
            self._copy(source, target)
        if num_less:
            self._keep_drafted(target, self._drafted[target] - num_less)

    @torch.inference_mode()
    def _restore(self, source: int, target: int, length: int) -> None:
        """Put the checkpoint of `source` at a length into `target`, with those before it.

        At length 0 there is none: operations begin there with zeros.
        """
        self._checkpoints.copy(source, target, length)
        self._lost.discard(target)
        self._keep_drafted(target, 0)
        if length and self._layers:
            kept = self._checkpoints.longest(target, length)
            assert kept is not None
            assert kept.length == length
            for layer, state in zip(self._layers.values(), kept.states, strict=True):
                layer.states[target] = state

    @torch.inference_mode()
    def _copy(self, source: int, target: int) -> None:
        """Let a slot stand where another one stands."""
        for layer in self._layers.values():
            for tensor in (layer.states, layer.kept, layer.log):
                tensor[target] = tensor[source]
        self._drafted[target] = self._drafted[source]
        self._lost.discard(target)
        self._checkpoints.copy(source, target, self._checkpoints.newest(source))

    def _most(self) -> int:
        """How many checkpoints of a forward can be kept: they are there before old ones go."""
        return max(1, self._budget // self.step_bytes) if self._layers else 1 << 62


def most_checkpoint_bytes(available_bytes: int) -> int:
    """Return how much of the free memory the checkpoints of all slots may take."""
    return min(_MOST_BYTES, int(_MOST_SHARE * max(0, available_bytes)))


def _part(
    threads: CpuThreads,
    layer: LayerState,
    tokens: StateTokens,
    inputs: Sequence[Tensor],
    part: slice,
) -> Tensor:
    some = StateTokens(tokens.slots[part], tokens.positions[part])
    return layer(threads, some, [x[part] for x in inputs])
