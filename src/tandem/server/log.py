"""Writes the server's log in a thread, so that a slow or missing reader blocks no client.

A pipe holds 64 KB; a write to a full pipe waits for its reader. So lines wait in a bounded queue,
and lines that do not fit are counted and dropped.
"""

import contextlib
import logging
import logging.handlers
import queue
import threading
from collections.abc import Iterator

_MOST_LINES = 10_000
# At the end, a slow reader gets this much time.
_LAST_SECONDS = 1.0

Lines = queue.Queue[logging.LogRecord | None]


class _Queue(logging.handlers.QueueHandler):
    """Passes log lines to a thread, and never waits."""

    def __init__(self, most_lines: int) -> None:
        """Keep at most this many unwritten lines."""
        self.lines: Lines = queue.Queue(most_lines)
        super().__init__(self.lines)
        self._num_lost = 0

    def enqueue(self, record: logging.LogRecord) -> None:
        """Queue a line, or count it as lost; the next queued line reports how many were lost."""
        if self._num_lost:
            record.msg = f"{record.msg} ({self._num_lost} lines before it were lost)"
        try:
            self.lines.put_nowait(record)
        except queue.Full:
            self._num_lost += 1
        else:
            self._num_lost = 0


@contextlib.contextmanager
def written_in_a_thread(
    most_lines: int = _MOST_LINES,
) -> Iterator[Lines]:
    """Write log records in a thread while the context is open, through the existing handlers.

    Yields the queue of unwritten lines.
    """
    root = logging.getLogger()
    handlers, log = root.handlers[:], _Queue(most_lines)

    def write() -> None:
        while (record := log.lines.get()) is not None:
            for handler in handlers:
                handler.handle(record)

    thread = threading.Thread(target=write, name="tandem-log", daemon=True)
    thread.start()
    root.handlers[:] = [log]
    try:
        yield log.lines
    finally:
        root.handlers[:] = handlers
        with contextlib.suppress(queue.Full):
            log.lines.put(None, timeout=_LAST_SECONDS)
        thread.join(_LAST_SECONDS)
