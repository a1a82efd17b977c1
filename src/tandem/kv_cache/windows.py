"""Rings: layers with a sliding window store each of their last positions modulo the ring's size.

The layers' memory therefore does not grow with a text. A ring is larger than its window by a
margin: a slot can continue from an earlier position only if nothing that this position sees has
been overwritten.
"""

from collections.abc import Iterator, Sequence

from tandem.hf.kv_sizes import ring_size
from tandem.kernels.attention import BLOCK_TOKENS, Segment


class Rings:
    """Records how far each slot has been written, to tell which positions its rings still have."""

    def __init__(self, num_slots: int) -> None:
        """Start with empty slots and no windows; `add` adds the windows."""
        self._windows: set[int] = set()
        self._ends = [0] * num_slots  # slot -> end of the positions written since it began

    def add(self, window: int) -> None:
        """Record that a layer's window has this size, which counts a token's own position."""
        self._windows.add(window)

    def note_written(self, slot: int, end: int) -> None:
        """Record that a step writes a slot up to, not including, position `end`.

        The step's tokens count even if some are taken back later.
        """
        self._ends[slot] = max(self._ends[slot], end)

    def begin_anew(self, slot: int, length: int = 0) -> None:
        """Reset a slot to `length` tokens, with nothing written after them."""
        self._ends[slot] = length

    def follow(self, source: int, target: int) -> None:
        """Record that slot `target` was copied from slot `source`."""
        self._ends[target] = self._ends[source]

    def first(self, slot: int, window: int) -> int:
        """Return the first position that a slot still has in layers with a window of this size."""
        # Writing a block's first position clears the block.
        end = -(-self._ends[slot] // BLOCK_TOKENS) * BLOCK_TOKENS
        return max(0, end - ring_size(window))

    def reaches(self, slot: int, length: int) -> bool:
        """Tell whether a slot still has all positions that a token at position `length` sees."""
        return all(self.first(slot, n) <= max(0, length + 1 - n) for n in self._windows)


def pieces_of_step(
    segments: Sequence[Segment], window: int
) -> Iterator[tuple[Sequence[Segment], slice]]:
    """Split a step for a layer with a window; yield each part's segments and range of tokens.

    Parts are so short that a ring has room for a part's tokens and for all positions that they see.
    Without a window (0), or if all segments are so short, the step is one part.
    """
    most = ring_size(window) - window - BLOCK_TOKENS
    if not window or all(segment.num_tokens <= most for segment in segments):
        yield segments, slice(None)
        return
    begin = 0
    for slot, position, count in segments:
        for done in range(0, count, most):
            part = min(most, count - done)
            yield [Segment(slot, position + done, part)], slice(begin, begin + part)
            begin += part
