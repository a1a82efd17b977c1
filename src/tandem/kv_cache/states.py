"""States besides keys and values: what convolutions and linear attention keep of each sequence.

A conversation that continues, branches or is edited starts from the longest checkpoint within the
tokens that have not changed.
"""

from abc import ABC
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from tandem.experts.store import host_memory
from tandem.kernels.attention import Segment
from tandem.kernels.recurrent import StateOperation
from tandem.kv_cache.checkpoints import KeptCheckpoints, cut_lengths

_MOST_BYTES = 1 << 30  # limit for the checkpoints of all slots
_MOST_SHARE = 1 / 8  # share of the free memory


class StateKey(NamedTuple):
    """Identifies a state of a model."""

    layer: int
    kind: str
    """"convolution", "recurrence", or another name if the layer keeps more states."""
    number: int
    """The index of the state among the layer's states of this kind."""


class StateHandle(NamedTuple):
    """Stands for a state while a model's code passes it from its cache to an operation."""

    cache: Any
    layer: int
    number: int

    def advance(
        self, kind: str, operation: Callable[[], StateOperation], *inputs: Tensor
    ) -> Tensor:
        """Advance the layer's state of this kind, as `SlotCache.advance` does."""
        key = StateKey(self.layer, kind, self.number)
        result: Tensor = self.cache.advance(key, operation, *inputs)
        return result

    def to(self, *args: object, **kwargs: object) -> "StateHandle":
        """Return this handle; a model's code converts it as if it were a tensor."""
        return self


class HasStates(Protocol):
    """A layer's operation together with the states that it advances."""

    @property
    def states(self) -> Tensor:
        """(slots, ...) fp32, on the computing device."""


_Layer = TypeVar("_Layer", bound=HasStates)


@dataclass
class Cut:
    """A checkpoint that a forward leaves after its first `token` tokens, in one slot.

    The slot then has `length` tokens.
    """

    slot: int
    token: int
    length: int
    states: list[Tensor] = field(default_factory=list)


class KeptStates(ABC, Generic[_Layer]):
    """The states of a model's layers by slot, and their checkpoints in host memory."""

    def __init__(self, num_slots: int) -> None:
        """Hold states for `num_slots` slots; layers are added when the model uses them."""
        self._num_slots = num_slots
        self._layers: dict[StateKey, _Layer] = {}
        self._checkpoints = KeptCheckpoints(num_slots)
        self._cuts: list[Cut] = []
        self._drafted = [0] * num_slots  # tokens of a slot's last step that may still be taken back
        self._announced: list[Segment] = []  # segments of the decode step under way
        self._every = 0
        self._budget = most_checkpoint_bytes(host_memory.available_bytes())

    def __bool__(self) -> bool:
        """Tell whether the model has states, among the layers used so far."""
        return bool(self._layers)

    @property
    def num_bytes(self) -> int:
        """Bytes of the states and of their checkpoints."""
        kept = self._checkpoints.num_bytes
        return kept + sum(x.nbytes for layer in self._layers.values() for x in self._of(layer))

    @property
    def step_bytes(self) -> int:
        """Bytes of one slot's states, which a decode step reads and writes."""
        return sum(layer.states[0].nbytes for layer in self._layers.values())

    def _of(self, layer: _Layer) -> tuple[Tensor, ...]:
        """Return all tensors that a layer keeps, each (slots, ...)."""
        return (layer.states,)

    def begin(self, segments: Iterable[Segment]) -> None:
        """Announce prompts' tokens; plan after which of these tokens checkpoints are left."""
        self._cuts, self._announced = [], []
        first = 0
        for segment in segments:
            self._drafted[segment.slot] = 0  # the new tokens replace what was kept for drafted ones
            begin, slot = segment.first_position, segment.slot
            newest = self._checkpoints.newest(slot)
            end = begin + segment.num_tokens
            for length in cut_lengths(begin, end, newest, self._every)[-self._most() :]:
                self._cuts.append(Cut(slot, first + length - begin, length))
            first += segment.num_tokens

    def begin_step(self, segments: Sequence[Segment]) -> None:
        """Announce a decode step's tokens; all but the first of a slot may be taken back."""
        self._cuts, self._announced = [], list(segments)
        for segment in segments:
            self._drafted[segment.slot] = 0

    def _with_cuts(
        self, layer: _Layer, num_tokens: int, compute: Callable[[slice], Tensor]
    ) -> Tensor:
        """Return a layer's outputs for the announced tokens; copy its states at each `Cut`.

        `compute` advances the states over a range of the tokens and returns the outputs.
        """
        outputs, first = [], 0
        for cut in self._cuts:
            outputs.append(compute(slice(first, cut.token)))
            cut.states.append(_on_host(layer.states[cut.slot]))
            first = cut.token
        if first < num_tokens:
            outputs.append(compute(slice(first, num_tokens)))
        return torch.cat(outputs)

    def commit(self) -> None:
        """Keep the checkpoints and note the drafted tokens of the completed forward."""
        for cut in self._cuts:
            if cut.states and len(cut.states) == len(self._layers):
                self._checkpoints.add(cut.slot, cut.length, cut.states)
        self._cuts = []
        self._checkpoints.thin(self._budget)
        for segment in self._announced:
            if segment.num_tokens > 1:
                self._keep_drafted(segment.slot, segment.num_tokens - 1)
        self._announced = []

    def _keep_drafted(self, slot: int, num_tokens: int) -> None:
        """Record how many drafted tokens a slot keeps; its next step advances states over them."""
        self._drafted[slot] = num_tokens

    def save(self, slots: Iterable[int]) -> Callable[[], None]:
        """Copy the states of some slots; return a function that restores them."""
        drafted = {slot: self._drafted[slot] for slot in slots}
        saved = [
            (tensor, slot, tensor[slot].clone())
            for layer in self._layers.values()
            for tensor in self._of(layer)
            for slot in drafted
        ]

        def put_back() -> None:
            for slot, count in drafted.items():
                self._drafted[slot] = count
            for tensor, slot, copy in saved:
                tensor[slot] = copy

        return put_back

    # ---- going back ------------------------------------------------------------------------------

    def can_take_back(self, slot: int, num_tokens: int) -> bool:
        """Tell whether a slot's last `num_tokens` tokens were drafted in its last step."""
        return num_tokens <= self._drafted[slot]

    def usable(self, slot: int, length: int, held: int) -> int:
        """Return how many of a slot's first `length` tokens the slot can continue from.

        `held` is the number of all tokens of the slot. If its states cannot go back to `length`,
        the result is the length of the longest checkpoint; 0: there is none.
        """
        if not self or self.can_take_back(slot, held - length):
            return length
        longest = self._checkpoints.longest(slot, length)
        return longest.length if longest else 0

    def go_back(self, source: int, target: int, length: int, num_less: int) -> None:
        """Set slot `target` to the states that slot `source` had after its first `length` tokens.

        `usable` must have returned `length`; `source` now has `num_less` tokens more.
        """
        if not self.can_take_back(source, num_less):
            self._restore(source, target, length)
            return
        if source != target:
            self._copy(source, target)
        if num_less:
            self._keep_drafted(target, self._drafted[target] - num_less)

    @torch.inference_mode()
    def _restore(self, source: int, target: int, length: int) -> None:
        """Set slot `target` to slot `source`'s checkpoint at `length`; copy `source`'s checkpoints.

        Only checkpoints of at most `length` tokens are copied. There is no checkpoint at length 0,
        because operations begin there with zeros.
        """
        self._checkpoints.copy(source, target, length)
        self._keep_drafted(target, 0)
        if length and self._layers:
            kept = self._checkpoints.longest(target, length)
            assert kept is not None
            assert kept.length == length
            for layer, state in zip(self._layers.values(), kept.states, strict=True):
                layer.states[target].copy_(state, non_blocking=True)

    @torch.inference_mode()
    def _copy(self, source: int, target: int) -> None:
        """Copy the states and checkpoints of `source` to `target`."""
        for layer in self._layers.values():
            for tensor in self._of(layer):
                tensor[target] = tensor[source]
        self._drafted[target] = self._drafted[source]
        self._checkpoints.copy(source, target, self._checkpoints.newest(source))

    def _most(self) -> int:
        """Return how many checkpoints of one forward fit the budget if no others are kept."""
        return max(1, self._budget // self.step_bytes) if self._layers else 1 << 62


def _on_host(state: Tensor) -> Tensor:
    """Return a copy of a state in host memory; a GPU writes the copy asynchronously.

    The host must not read such a copy: only the GPU does, later in the same stream.
    """
    host = torch.empty(state.shape, dtype=state.dtype, device="cpu", pin_memory=state.is_cuda)
    return host.copy_(state, non_blocking=True)


def most_checkpoint_bytes(available_bytes: int) -> int:
    """Return how many of `available_bytes` the checkpoints of all slots may take."""
    return min(_MOST_BYTES, int(_MOST_SHARE * max(0, available_bytes)))
