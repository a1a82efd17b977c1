"""Tests that a conversation loses its oldest turns as a whole."""

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.generate.conversation import trim_conversation

Messages = list[dict[str, str]]

_ROLES = {"s": "system", "d": "developer", "u": "user", "a": "assistant", "t": "tool"}


def _messages(shape: str) -> Messages:
    return [{"role": _ROLES[letter], "content": str(i)} for i, letter in enumerate(shape)]


def _at_most(count: int) -> Callable[[Messages], bool]:
    return lambda messages: len(messages) <= count


@pytest.mark.parametrize(
    ("shape", "room", "kept", "dropped"),
    [
        ("uau", 3, "012", 0),
        ("uau", 2, "2", 1),
        ("suau", 2, "03", 1),
        ("sduau", 3, "014", 1),
        ("suauau", 4, "0345", 1),
        ("suauau", 3, "05", 2),
        ("uatatau", 6, "6", 1),  # a tool call and its results belong to their question
        ("uaua", 2, "23", 1),
        ("uuau", 3, "3", 1),  # two messages in a row are one question
        ("aua", 2, "12", 1),  # a greeting is dropped first
        ("su", 1, "01", 0),  # nothing can be dropped
        ("suau", 1, "03", 1),  # nor does the part that must stay fit
        ("uauatat", 2, "23456", 1),
        ("s", 0, "0", 0),
        ("", 0, "", 0),
    ],
)
def test_whole_turns_are_dropped_from_the_front(
    shape: str, room: int, kept: str, dropped: int
) -> None:
    messages, num_dropped = trim_conversation(_messages(shape), _at_most(room))
    assert "".join(message["content"] for message in messages) == kept
    assert num_dropped == dropped


@given(shape=st.text("duatu", max_size=40), room=st.integers(0, 40))
def test_no_more_turns_are_dropped_than_needed(shape: str, room: int) -> None:
    messages = _messages(shape)
    kept, num_dropped = trim_conversation(messages, _at_most(room))
    dropped = [message for message in messages if message not in kept]
    assert kept == [message for message in messages if message in kept]  # order
    assert (num_dropped == 0) == (not dropped)
    if dropped:
        starts = [
            i
            for i, message in enumerate(dropped)
            if i == 0 or (message["role"] == "user" and dropped[i - 1]["role"] != "user")
        ]
        assert len(starts) == num_dropped
        assert len(kept) + len(dropped) - starts[-1] > room  # it does not fit with the last of them
        begin = messages.index(dropped[0])
        assert messages[begin : begin + len(dropped)] == dropped
        assert kept[-1] == messages[-1]
