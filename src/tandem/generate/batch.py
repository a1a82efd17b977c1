"""Answers several prompts together: collects the scheduler's outputs into answers."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from tandem.generate.answer import Answer
from tandem.generate.request import Request
from tandem.generate.scheduler import Scheduler
from tandem.generate.token_output import StepFailedError, TokenOutput


@dataclass(slots=True)
class _Answering:
    """The outputs for one prompt so far, from which its answer is made."""

    prompt_tokens: int
    latest: TokenOutput
    token_ids: list[int] = field(default_factory=list)
    pieces: list[str] = field(default_factory=list)
    first: float = 0.0
    last: float = 0.0

    def take(self, output: TokenOutput) -> None:
        """Add the token and the text of a step's output."""
        if output.token_id is not None:
            self.token_ids.append(output.token_id)
        self.pieces.append(output.text)
        self.latest = output

    def answer(self, started: float) -> Answer:
        end = self.latest
        assert end.finish_reason is not None
        return Answer(
            text="".join(self.pieces),
            token_ids=self.token_ids,
            prompt_tokens=self.prompt_tokens,
            time_to_first_token_seconds=max(self.first - started, 0.0),
            decode_seconds=self.last - self.first,
            finish_reason=end.finish_reason,
            reused_tokens=end.reused_tokens,
            drafted_tokens=end.drafted_tokens,
            accepted_tokens=end.accepted_tokens,
        )


class Batch:
    """Runs the prompts of one call to `Generator.start`; their requests are numbered from 0."""

    def __init__(
        self,
        scheduler: Scheduler,
        requests: Sequence[Request],
        on_text: Callable[[int, str], None],
    ) -> None:
        """Submit the requests to a scheduler, which must have no other requests."""
        self._scheduler = scheduler
        self._on_text = on_text
        self._answers = [
            _Answering(len(one.prompt), TokenOutput(one.request_id)) for one in requests
        ]
        self._started = time.perf_counter()
        for request in requests:
            scheduler.add(request)

    @property
    def is_done(self) -> bool:
        """Tell whether every prompt has its answer."""
        return all(one.latest.finish_reason is not None for one in self._answers)

    def advance(self) -> None:
        """Run one step of the scheduler.

        If the step fails, raises its first error and interrupts all unfinished answers.
        """
        try:
            token_outputs = self._scheduler.step()
        except StepFailedError as failed:
            self.interrupt()
            raise failed.failures[0].error from None
        now = time.perf_counter()
        for output in token_outputs:
            one = self._answers[output.request_id]
            one.first, one.last = one.first or now, now
            self._take(output)

    def interrupt(self) -> None:
        """End every unfinished answer at its present length."""
        for number, one in enumerate(self._answers):
            if one.latest.finish_reason is None:
                output = self._scheduler.interrupt(number)
                self._take(output or TokenOutput(number, finish_reason="interrupted"))

    def answers(self) -> list[Answer]:
        """Return the answers in the order of the prompts; `is_done` must be true."""
        return [one.answer(self._started) for one in self._answers]

    def _take(self, output: TokenOutput) -> None:
        self._answers[output.request_id].take(output)
        if output.text:
            self._on_text(output.request_id, output.text)
