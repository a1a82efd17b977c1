"""Tests that the log is written in a thread, so that a blocked reader delays nothing."""

import logging
import os
import re
from collections.abc import Iterator

import pytest

from tandem.server.log import written_in_a_thread

_NUM_LINES, _PIPE_BYTES = 5000, 64 << 10


@pytest.fixture
def pipe() -> Iterator[tuple[int, logging.Logger]]:
    """The read end of a pipe, not read yet, and a logger that writes to the other end."""
    reading, writing = os.pipe()
    root, before = logging.getLogger(), logging.getLogger().handlers[:]
    stream = os.fdopen(writing, "w")
    root.handlers[:] = [logging.StreamHandler(stream)]
    try:
        yield reading, logging.getLogger("tandem.server")
    finally:
        root.handlers[:] = before
        stream.close()
        os.close(reading)


def test_a_log_that_nobody_reads_holds_nobody_up(pipe: tuple[int, logging.Logger]) -> None:
    reading, log = pipe
    text = b""
    with written_in_a_thread(most_lines=100) as waiting:
        for number in range(_NUM_LINES):  # more than the pipe and the queue take
            log.warning("line %04d %s", number, "x" * 100)
        while not waiting.empty():
            text += os.read(reading, _PIPE_BYTES)
        log.warning("one more")
        while b"one more" not in text or not text.endswith(b"\n"):
            text += os.read(reading, _PIPE_BYTES)
    lines = text.decode().splitlines()
    num_kept = sum(line.startswith("line") for line in lines)
    num_lost = sum(int(number) for number in re.findall(r"\((\d+) lines before", text.decode()))
    assert lines[0].startswith("line 0000")
    assert lines[-1].startswith("one more")
    assert num_lost == _NUM_LINES - num_kept > 0


def test_what_was_logged_is_written_at_the_end(pipe: tuple[int, logging.Logger]) -> None:
    reading, log = pipe
    with written_in_a_thread():
        log.warning("good night")
    assert os.read(reading, _PIPE_BYTES) == b"good night\n"
