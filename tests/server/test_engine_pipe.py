"""The pipe from the engine process, as the event loop reads it."""

import multiprocessing

import pytest

from tandem.engine.process import came


def test_all_messages_that_have_come_are_read_at_once() -> None:
    ours, theirs = multiprocessing.Pipe()
    for number in range(3):
        theirs.send(number)
    assert list(came(ours)) == [0, 1, 2]


def test_messages_before_the_end_are_not_lost() -> None:
    ours, theirs = multiprocessing.Pipe()
    theirs.send("last")
    theirs.close()
    reading = came(ours)
    assert next(reading) == "last"
    with pytest.raises(EOFError):
        next(reading)
