"""A request in a sequence slot: its text, its end and its log-probabilities as its tokens come."""

from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from tandem.decode.images import ImagePrompt
from tandem.generate.answer import FinishReason
from tandem.generate.ending import EndOptions, NotYet
from tandem.generate.penalties import Together
from tandem.generate.sampler import Sampler
from tandem.generate.sampling import SamplingOptions
from tandem.generate.stopping import StopStrings
from tandem.generate.text import TextStream
from tandem.generate.token_output import TokenLogprob, TokenOutput


class Constraint(Protocol):
    """Limits what may come next, a grammar for instance."""

    def restrict(self, scores: Tensor) -> Tensor:
        """Return scores (1, vocabulary) with -inf for what may not come."""

    def accept(self, token: int) -> bool:
        """Take the token that came; tell whether nothing may follow it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One prompt and how it is to be answered."""

    request_id: int
    prompt: tuple[int, ...]
    options: SamplingOptions
    constraint: Constraint | None = None
    num_top_logprobs: int | None = None
    """None: no log-probabilities; else how many alternatives beside each token's own."""
    keeps_special: bool = False
    """Whether special tokens show in the text, for a program that parses it."""
    has_prompt_logprobs: bool = False
    """Whether the prompt's tokens have log-probabilities too; then none of it is reused."""
    end: EndOptions = field(default_factory=EndOptions)
    images: ImagePrompt | None = None
    """The images of the prompt, which is then `images.ids`."""
    priority: int = 0
    """Requests of a lower number go first."""
    may_speculate: bool = True
    """Whether tokens may be drafted and verified together; the answer is the same."""
    owner: bytes = b""
    """Whose it is: nothing is reused of what another owner's requests have left."""

    @property
    def keys(self) -> tuple[int, ...]:
        """The prompt as slots hold it: what is equal of two prompts' keys is shared."""
        return self.prompt if self.images is None else self.images.keys

    def constraint_until(self, end_ids: frozenset[int]) -> Constraint | None:
        """Return what limits the choice of tokens, with no end before its time."""
        if not self.end.min_tokens:
            return self.constraint
        not_yet = NotYet(self.end.min_tokens, end_ids)
        return not_yet if self.constraint is None else Together([not_yet, self.constraint])


@dataclass(slots=True, eq=False)
class Running:
    """A request in a sequence slot."""

    request: Request
    slot: int
    max_new_tokens: int
    sampler: Sampler
    stop: StopStrings
    text: TextStream | None
    history: list[int]
    reused_tokens: int
    num_done: int
    """Prompt tokens that the slot holds."""
    end_ids: frozenset[int]
    constraint: Constraint | None
    on_disk: list[tuple[int, bytes]] = field(default_factory=list)
    """The prompt's next segments that are on disk: their first tokens and their keys."""
    prompt_logprobs: list[TokenLogprob | None] | None = None
    """Of the prompt's tokens so far, until they are reported."""
    generated: int = 0
    drafted: int = 0
    """Drafted tokens that were verified; `accepted` of them are the answer's."""
    accepted: int = 0
    finish_reason: FinishReason | None = None

    def take(self, token: int) -> str:
        """Append a token; return the text that is now certain."""
        self.history.append(token)
        self.generated += 1
        is_end = token in self.end_ids
        constraint = self.constraint
        is_through = constraint is not None and not is_end and constraint.accept(token)
        piece = ""
        if self.text is not None and not is_end:
            piece = self.text.add(token)
            if self.generated > self.request.end.min_tokens:
                piece = self.stop.add(piece)
        if is_end or is_through or self.stop.is_met:
            self.finish_reason = "stop"
        elif self.generated >= self.max_new_tokens:
            self.finish_reason = "length"
        return piece + self._rest() if self.finish_reason is not None else piece

    def interrupt(self) -> str:
        """End where it stands; return the text that was held back."""
        self.finish_reason = "interrupted"
        return self._rest()

    def output(
        self, token: int | None, text: str, logprob: TokenLogprob | None = None
    ) -> TokenOutput:
        """Return what a step has brought: a token (None: an end without one) and its text."""
        told, self.prompt_logprobs = self.prompt_logprobs, None
        return TokenOutput(
            request_id=self.request.request_id,
            text=text,
            token_id=token,
            logprob=logprob,
            finish_reason=self.finish_reason,
            generated_tokens=self.generated,
            reused_tokens=self.reused_tokens,
            drafted_tokens=self.drafted,
            accepted_tokens=self.accepted,
            prompt_logprobs=None if told is None else tuple(told),
            stop_string=self.stop.met,
        )

    def note_prompt(self, logits: Tensor, first: int) -> None:
        """Note how likely prompt tokens were: those after each of logits (n_tokens, vocabulary)."""
        assert self.prompt_logprobs is not None
        prompt, num_top = self.request.prompt, self.request.num_top_logprobs or 0
        self.prompt_logprobs += [
            logprob_of(row, token, num_top)
            for row, token in zip(logits, prompt[first + 1 :], strict=False)
        ]

    def _rest(self) -> str:
        """Return what was held back, now that nothing follows."""
        if self.text is None or self.stop.is_met:
            return ""
        rest = self.stop.add(self.text.finish())
        rest += self.stop.finish()
        if self.stop.is_met:
            self.finish_reason = "stop"
        return rest


def logprob_of(logits: Tensor, token: int, num_top: int) -> TokenLogprob:
    """Return how likely a token was by logits (vocabulary,), and the likeliest in its place."""
    logprobs = torch.log_softmax(logits.float(), -1)
    values, ids = logprobs.topk(num_top) if num_top else (logprobs[:0], logprobs[:0].long())
    top = tuple(zip((int(i) for i in ids.tolist()), values.tolist(), strict=True))
    return TokenLogprob(token, float(logprobs[token]), top)
