"""Slots whose contents cannot be taken out and put in elsewhere: what they say to that."""

from collections.abc import Sequence

from tandem.core.errors import UnsupportedModelError


class UnmovableSlots:
    """What slots say whose contents cannot be moved."""

    @property
    def can_move(self) -> bool:
        """Whether `take_out` and `put_in` may be called."""
        return False

    @property
    def has_states(self) -> bool:
        """Whether slots that can move go on from states, too."""
        return False

    def take_out(self, slot: int, first: int, num_tokens: int) -> memoryview | None:
        """Return a copy of what a slot keeps of some tokens, where it can be moved."""
        return None

    def cut(self, slot: int, length: int) -> bool:
        """Let a slot forget what it holds beyond `length` tokens, where others can be put in."""
        return False

    def put_in(self, slot: int, tokens: Sequence[int], data: memoryview) -> None:
        """Append tokens to a slot, with what `take_out` has returned, where it can be moved."""
        raise UnsupportedModelError("tokens cannot be put into these slots: ask can_move first")

    def keep_states_every(self, num_tokens: int) -> None:
        """No-op: there are no states that move."""

    def take_states(self, slot: int, length: int) -> memoryview | None:
        """Return a copy of a slot's states after so many tokens, where there are some."""
        return None

    def put_states(self, slot: int, data: memoryview) -> None:
        """Give a slot the states after its tokens, where there are some."""
        raise UnsupportedModelError("these slots take no states: ask has_states first")
