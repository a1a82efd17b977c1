"""What a step that could not serve some requests raises."""

from typing import NamedTuple

from tandem.generate.token_output import TokenOutput


class Failure(NamedTuple):
    """What some requests came to that a step could not serve."""

    request_ids: tuple[int, ...]
    error: Exception


class StepFailedError(Exception):
    """A step failed for some requests, which are dropped; what it brought the others is here."""

    def __init__(self, failures: list[Failure], token_outputs: list[TokenOutput]) -> None:
        """Carry both; each failure has requests of its own."""
        super().__init__("; ".join(str(failure.error) for failure in failures))
        self.failures = failures
        self.token_outputs = token_outputs
