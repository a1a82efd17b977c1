"""Several requests on three slots, by the loop that the server runs."""

from collections.abc import Sequence

from tandem.generate.generator import Generator
from tandem.generate.request import Request
from tandem.generate.sampling import SamplingOptions


def scheduled_answers(
    generator: Generator, prompts: Sequence[Sequence[int]], *, chunk_tokens: int
) -> tuple[dict[int, list[int | None]], int]:
    """Return the tokens of each request, and how many tokens of prompts were reused."""
    scheduler = generator.scheduler(3, chunk_tokens=chunk_tokens)
    tokens: dict[int, list[int | None]] = {}
    for number, prompt in enumerate(prompts):
        options = SamplingOptions(max_new_tokens=8 + 3 * number, temperature=0)
        scheduler.add(Request(request_id=number, prompt=tuple(prompt), options=options))
    while scheduler.has_work:
        for progress in scheduler.step():
            tokens.setdefault(progress.request_id, []).append(progress.token_id)
    return tokens, scheduler.counts.reused_tokens
