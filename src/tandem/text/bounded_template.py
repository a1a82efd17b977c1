"""Runs chat templates, which are programs from a model's files, within limits.

Jinja's sandbox hides Python's internals from a template and limits ranges, but not nested loops or
texts that double. So a template runs in its own thread, whose processor time the caller watches. At
the limit an exception is raised in the thread, between two Python instructions; a single
instruction that takes gigabytes is not interrupted.
"""

import contextlib
import ctypes
import threading
import time
from collections.abc import Callable
from typing import TypeVar

from tandem.experts.store.host_memory import process_bytes
from tandem.foreign_types import Tokenizer

T = TypeVar("T")

# A conversation of 4,096 messages takes a published template a tenth of a second.
CPU_SECONDS = 3.0
MOST_BYTES = 1 << 30
_LOOK_SECONDS = 0.05
# Checks of a thread that has been told to end, before it is abandoned.
_MOST_LOOKS = 200


class TemplateEndedError(Exception):
    """A template took too much time or memory."""


class _End(BaseException):
    """Ends the thread in which it is raised."""


def rendered(tokenizer: Tokenizer, messages: object, /, **options: object) -> str:
    """Return a conversation formatted by the chat template of a tokenizer or processor.

    Raises the template's own exceptions, or `TemplateEndedError`.
    """
    options = {"add_generation_prompt": True, **options}
    return str(bounded(lambda: tokenizer.apply_chat_template(messages, tokenize=False, **options)))


def bounded(render: Callable[[], T]) -> T:
    """Run `render` in a thread and return its result.

    Raises the exceptions of `render`, or `TemplateEndedError` if it takes too much time or memory.
    """
    found: list[T] = []
    problem: list[BaseException] = []

    def run() -> None:
        try:
            found.append(render())
        except BaseException as error:
            problem.append(error)

    before = process_bytes()
    thread = threading.Thread(target=run, name="tandem-template", daemon=True)
    thread.start()
    num_looks = 0
    while thread.is_alive() and num_looks < _MOST_LOOKS:
        thread.join(_LOOK_SECONDS)
        if num_looks or _takes_too_much(thread, before):
            num_looks += 1
            ident, ended = ctypes.c_ulong(thread.ident or 0), ctypes.py_object(_End)
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ident, ended)
    if num_looks and not found:
        raise TemplateEndedError(
            f"it took more than {CPU_SECONDS:g} seconds or {MOST_BYTES >> 30} GiB and was ended"
        )
    if problem:
        raise problem[0]
    return found[0]


def _takes_too_much(thread: threading.Thread, bytes_before: int) -> bool:
    """Tell whether a thread exceeds `CPU_SECONDS`, or the process has grown over `MOST_BYTES`."""
    with contextlib.suppress(OSError):  # the thread has ended meanwhile
        if thread.ident is not None and thread.is_alive():
            seconds = time.clock_gettime(time.pthread_getcpuclockid(thread.ident))
            return seconds > CPU_SECONDS or process_bytes() - bytes_before > MOST_BYTES
    return False
