"""Prompts for the HTTP side, from the prompt process, which may be killed.

The HTTP side itself only moves bytes, so that it stays responsive whatever bodies contain. Short
and long bodies wait in separate queues.
"""

import asyncio
import functools
import pickle
import sys

from tandem.apis.errors import ApiError, server_error
from tandem.engine.helper import framed
from tandem.server.helper_process import HelperProcess
from tandem.server.preparing import Answered, Job, Setup
from tandem.server.prompt_process import LONG, SHORT, Pickled, main

# Forking takes some milliseconds, too much for a shorter body.
_SHORT_BODY_BYTES = 64 << 10
# Jobs sent at a time. A short job is already there when the previous one ends.
_MOST_SHORT, _MOST_LONG = 4, 2
# A chat template alone is stopped after 3 seconds of CPU time.
_SHORT_SECONDS = 60.0


class Prompts:
    """Turns bodies into requests in a separate process, which is restarted if it ends."""

    def __init__(self, setup: Setup, *, most_seconds: float = _SHORT_SECONDS) -> None:
        """Prepare; no process is started yet.

        The process is killed if a short body takes more than `most_seconds`.
        """
        self._most_seconds = most_seconds
        first = functools.cache(lambda: framed(Pickled(sys.path, pickle.dumps(setup))))
        self.process = HelperProcess(
            main, first, unavailable="requests cannot be read now; ask again"
        )
        self._short = asyncio.Semaphore(_MOST_SHORT)
        self._long = asyncio.Semaphore(_MOST_LONG)

    async def ask(self, job: Job) -> Answered:
        """Return the result of a job; cancelling the call ends the work on a long body.

        Raises `ApiError` if the process, or its fork for a long body, ended before answering.
        """
        num_bytes = len(job.raw) + len(job.earlier or b"")
        # Images are opened in a fork.
        if num_bytes > _SHORT_BODY_BYTES or b"image" in job.raw:
            async with self._long:
                answered = await self.process.ask(framed(job), kind=LONG)
            problem = ApiError(
                400,
                f"the request takes more than {job.limits.processor_seconds:g} seconds of "
                "processor time, or too much memory, to be turned into a prompt; send less",
            )
        else:
            async with self._short:
                answered = await self.process.ask(
                    framed(job), kind=SHORT, seconds=self._most_seconds
                )
            problem = server_error(
                "the process that reads requests ended while it read this one; ask again",
                status=503,
            )
        if not isinstance(answered, Answered):
            raise problem
        return answered
