"""One batch of prompts being answered: steps the model until every row has ended."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor

from tandem.generate.answer import Answer, FinishReason
from tandem.generate.sampler import Sampler
from tandem.generate.sampling import SamplingOptions, SamplingRule
from tandem.generate.stopping import StopStrings
from tandem.generate.text import TextStream


class Rows(Protocol):
    """The model's side of a batch: its KV cache and how it is stepped."""

    def prefill(self) -> Tensor:
        """Run the prompts; return the logits of each row's next token: (rows, vocabulary)."""

    def decode(self, tokens: list[int]) -> Tensor:
        """Append one token per row; return the logits of the next: (rows, vocabulary)."""


@dataclass(slots=True)
class _Row:
    """One prompt and its answer so far."""

    prompt: list[int]
    stop: StopStrings
    text: TextStream | None
    token_ids: list[int] = field(default_factory=list)
    pieces: list[str] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    first: float = 0.0
    last: float = 0.0

    def answer(self, started: float, reused_tokens: int) -> Answer:
        assert self.finish_reason is not None
        return Answer(
            text="".join(self.pieces),
            token_ids=self.token_ids,
            prompt_tokens=len(self.prompt),
            time_to_first_token_seconds=max(self.first - started, 0.0),
            decode_seconds=self.last - self.first,
            finish_reason=self.finish_reason,
            reused_tokens=reused_tokens,
        )


class Run:
    """Advances a batch by one token per row at a time; `Generator.start` makes it."""

    def __init__(
        self,
        rows: Rows,
        prompts: list[list[int]],
        options: SamplingOptions,
        rule: SamplingRule,
        end_ids: frozenset[int],
        tokenizer: Any,
        on_text: Callable[[int, str], None],
    ) -> None:
        """Take checked prompts; `max_new_tokens` fits into the context."""
        self._steps = rows
        self._max_new_tokens = options.max_new_tokens
        self._sampler = Sampler(rule, len(prompts), options.seed)
        self._end_ids = end_ids
        self._on_text = on_text
        self._rows = [
            _Row(
                prompt,
                StopStrings(options.stop),
                TextStream(tokenizer) if tokenizer is not None else None,
            )
            for prompt in prompts
        ]
        self._histories = [list(prompt) for prompt in prompts]
        self._started = time.perf_counter()

    @property
    def is_done(self) -> bool:
        """Tell whether every row has ended."""
        return all(row.finish_reason is not None for row in self._rows)

    def advance(self) -> None:
        """Compute the next token of every row that has not ended: first the prompts."""
        if not any(row.token_ids for row in self._rows):
            logits = self._steps.prefill()
        else:
            logits = self._steps.decode([history[-1] for history in self._histories])
        tokens = self._sampler.choose(logits, self._histories)
        now = time.perf_counter()
        for number, (row, token) in enumerate(zip(self._rows, tokens, strict=True)):
            # A row that has ended is stepped on with the others; what it says is dropped.
            self._histories[number].append(token)
            if row.finish_reason is None:
                self._take(number, row, token, now)

    def interrupt(self) -> None:
        """End every row where it stands."""
        for number, row in enumerate(self._rows):
            if row.finish_reason is None:
                self._end(number, row, "interrupted")

    def answers(self) -> list[Answer]:
        """Return the answers in the order of the prompts, once all rows have ended."""
        reused: list[int] = getattr(self._steps, "reused_tokens", [0] * len(self._rows))
        return [
            row.answer(self._started, count) for row, count in zip(self._rows, reused, strict=True)
        ]

    def _take(self, number: int, row: _Row, token: int, now: float) -> None:
        row.first = row.first or now
        row.last = now
        row.token_ids.append(token)
        is_end = token in self._end_ids
        if row.text is not None and not is_end:
            self._give(number, row, row.stop.add(row.text.add(token)))
        if is_end or row.stop.is_met:
            self._end(number, row, "stop")
        elif len(row.token_ids) >= self._max_new_tokens:
            self._end(number, row, "length")

    def _end(self, number: int, row: _Row, reason: FinishReason) -> None:
        row.finish_reason = reason
        if row.text is not None and not row.stop.is_met:
            rest = row.stop.add(row.text.finish())
            self._give(number, row, rest + row.stop.finish())
            if row.stop.is_met:  # met by the very last piece
                row.finish_reason = "stop"

    def _give(self, number: int, row: _Row, piece: str) -> None:
        if piece:
            row.pieces.append(piece)
            self._on_text(number, piece)
