"""What layers with a sliding window keep of each slot: its last positions, from some first one on.

A slot's keys and values slide to the front of their memory when it is full, by whole chunks: the
memory's size follows the window, and results do not depend on when they slid. A slot goes on from
an earlier position only if what that one sees is still there.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from tandem.hf import kv_sizes
from tandem.kernels.attention import BLOCK_TOKENS, CHUNK_TOKENS, CachedAttention, Segment

# Called with a layer, the positions that its slots shall have room for, and how many to keep.
Reserve = Callable[[CachedAttention, int, int], None]


class KeptWindow:
    """The slots of all layers whose window has one size."""

    def __init__(self, window: int, num_slots: int, reserve: Reserve) -> None:
        """Keep what `window` positions see, the own one included, of slots that are empty.

        `reserve` makes room in a layer for so many positions a slot, of which the first are kept.
        """
        self.window = window
        self._reserve = reserve
        self.capacity = 0
        """Positions that a slot has room for."""
        self._layers: list[CachedAttention] = []
        self._firsts = [0] * num_slots
        self._positions: dict[int, Tensor] = {}
        self.positions: Tensor | None = None
        """Of the step's tokens, counted from the first position that their slot keeps."""

    def capacity_for(self, segments: Sequence[Segment]) -> int:
        """Return the room that slots need for new tokens, beside what these see."""
        most = max(segment.num_tokens for segment in segments)
        longest = max(segment.first_position + segment.num_tokens for segment in segments)
        room = kv_sizes.room_for(longest, self.window)
        return min(room, kv_sizes.most_kept(self.window, most))

    def add(self, layer: CachedAttention) -> None:
        """Take a layer, which is empty, with room for `capacity` positions."""
        self._reserve(layer, self.capacity, 0)
        self._layers.append(layer)

    def reaches(self, slot: int, length: int) -> bool:
        """Tell whether a slot still has what the token after its first `length` sees."""
        return self._firsts[slot] <= max(0, length + 1 - self.window)

    def first(self, slot: int) -> int:
        """Return the first position that a slot keeps."""
        return self._firsts[slot]

    def begin_anew(self, slot: int, length: int = 0) -> None:
        """Let a slot's memory begin where it needs to for a slot of `length` tokens."""
        self._firsts[slot] = self._needed_first(length)

    @torch.inference_mode()
    def pretend(self, length: int) -> None:
        """Let every slot's memory be where it is for a slot of `length` tokens."""
        for slot in range(len(self._firsts)):
            self.begin_anew(slot, length)
        self.place([Segment(0, length, 1)], torch.tensor([length], device="cpu"), is_kept=False)

    def follow(self, source: int, target: int) -> None:
        """Let a slot begin where another one does, from which it was copied."""
        self._firsts[target] = self._firsts[source]

    @torch.inference_mode()
    def place(self, segments: Sequence[Segment], positions: Tensor, *, is_kept: bool) -> None:
        """Make room for a step's tokens at their `positions` (n_tokens,), and note their places.

        Where the caller keeps the tensor of positions (`is_kept`), so does this.
        """
        for segment in segments:
            self._slide(segment)
        self._grow(segments)
        counts = torch.tensor([segment.num_tokens for segment in segments], device="cpu")
        firsts = torch.tensor([self._firsts[segment.slot] for segment in segments], device="cpu")
        relative = positions - firsts.repeat_interleave(counts)
        if not is_kept:
            self.positions = relative
            return
        with torch.inference_mode(False):
            kept = self._positions.setdefault(positions.data_ptr(), torch.empty_like(positions))
        self.positions = kept.copy_(relative)

    def _needed_first(self, position: int) -> int:
        seen = max(0, position + 1 - self.window - kv_sizes.MARGIN_TOKENS)
        return seen // CHUNK_TOKENS * CHUNK_TOKENS

    def _slide(self, segment: Segment) -> None:
        """Let a slot forget what no window reaches any more, if its memory is full."""
        slot, begin, count = segment
        old, new = self._firsts[slot], self._needed_first(begin)
        if begin + count - old <= self.capacity or new <= old:
            return
        shift = (new - old) // BLOCK_TOKENS
        used = -(-(begin - new) // BLOCK_TOKENS)
        for layer in self._layers:
            for tensor in (layer.keys, layer.values):
                tensor[slot, :, :used] = tensor[slot, :, shift : shift + used].clone()
        self._firsts[slot] = new

    def _grow(self, segments: Sequence[Segment]) -> None:
        """Make room for steps of more tokens than there have been."""
        needed = max(s.first_position + s.num_tokens - self._firsts[s.slot] for s in segments)
        if needed <= self.capacity:
            return
        used, self.capacity = self.capacity, max(needed, self.capacity_for(segments))
        for layer in self._layers:
            self._reserve(layer, self.capacity, used)
