"""The prompt process: checks bodies, writes prompts and tokenizes them, for the HTTP side.

A helper (`tandem.engine.helper`): it first receives a `Pickled` setup, and then any number of
`Job`s. Short jobs run one after the other; each long job runs in a fork. So a long job blocks no
other job, is killed if it exceeds its limits or its client leaves, and leaves no memory behind.
Torch is loaded only for models with images, and has threads only in forks, because forking a
process with threads is unsafe.
"""

import contextlib
import gc
import os
import pickle
import socket
import sys
from typing import NamedTuple

from tandem.engine.helper import answer, answer_in_fork, jobs, read
from tandem.server.preparing import Job, Preparer

SHORT, LONG = b"s", b"l"
# Nice values: the HTTP side has priority, and short jobs have priority over long ones.
_NICENESS, _NICER = 2, 3


class Pickled(NamedTuple):
    """A pickled `Setup`, and the `sys.path` from which its classes can be imported."""

    path: list[str]
    setup: bytes


def main() -> None:
    """Answer jobs from the socket that is stdin, until the HTTP side closes it."""
    os.nice(_NICENESS)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # a fork would not have its threads
    control = socket.socket(fileno=0)
    with contextlib.suppress(EOFError):
        first: Pickled = read(control)
        sys.path[:] = first.path
        preparer = Preparer(pickle.loads(first.setup))

        def prepared_in_fork(job: Job) -> object:
            os.nice(_NICER)
            return preparer.answer(job)

        gc.freeze()  # otherwise the first collection in a fork copies all of the memory
        for kind, connection in jobs(control):
            if kind == SHORT:
                answer(connection, preparer.answer)
            else:
                answer_in_fork(control, connection, prepared_in_fork)
