"""A request in a sequence slot, and its answer so far: text, end and log-probabilities."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from tandem.generate.answer import FinishReason
from tandem.generate.constraints import Constraint
from tandem.generate.request import Request
from tandem.generate.sampler import Sampler
from tandem.generate.stopping import StopStrings
from tandem.generate.text import TextStream
from tandem.generate.token_output import TokenLogprob, TokenOutput


@dataclass(slots=True, eq=False)
class Running:
    """A request in a sequence slot, and its answer so far."""

    request: Request
    slot: int
    max_new_tokens: int
    sampler: Sampler
    stop: StopStrings
    text: TextStream | None
    history: list[int]
    reused_tokens: int
    num_done: int
    """Prompt tokens whose keys and values the slot holds."""
    end_ids: frozenset[int]
    constraints: Sequence[Constraint]
    on_disk: list[tuple[int, bytes]] = field(default_factory=list)
    """The prompt's next segments on disk: (first token, key)."""
    prompt_logprobs: list[TokenLogprob | None] | None = None
    """Log-probabilities of the prompt's tokens so far; None: not requested, or already reported."""
    generated: int = 0
    drafted: int = 0
    """Drafted tokens that were verified."""
    accepted: int = 0
    finish_reason: FinishReason | None = None
    is_alone: bool = False
    """Whether the prompt must run alone because a forward shared with other requests failed."""

    def take(self, token: int) -> str:
        """Append a token, which may end the answer; return the text that is now certain."""
        self.history.append(token)
        self.generated += 1
        is_end = token in self.end_ids
        is_through = not is_end and any([one.accept(token) for one in self.constraints])
        piece = ""
        if self.text is not None and not is_end:
            piece = self.text.add(token)
            if self.generated > self.request.options.min_tokens:
                piece = self.stop.add(piece)
        if is_end or is_through or self.stop.is_met:
            self.finish_reason = "stop"
        elif self.generated >= self.max_new_tokens:
            self.finish_reason = "length"
        return piece + self._rest() if self.finish_reason is not None else piece

    def interrupt(self) -> str:
        """End the answer at its present length; return the text that was held back."""
        self.finish_reason = "interrupted"
        return self._rest()

    def output(
        self, token: int | None, text: str, logprob: TokenLogprob | None = None
    ) -> TokenOutput:
        """Return a step's output: a token, and the text that is now certain.

        `token` is None if the answer ends without a token.
        """
        logprobs, self.prompt_logprobs = self.prompt_logprobs, None
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
            prompt_logprobs=None if logprobs is None else tuple(logprobs),
            stop_string=self.stop.met,
        )

    def note_prompt(self, logits: Tensor, first: int) -> None:
        """Record the log-probabilities of the prompt tokens from position `first` + 1 on.

        `logits` (n_tokens, vocabulary) are the logits after the tokens from position `first` on.
        """
        assert self.prompt_logprobs is not None
        prompt, num_top = self.request.prompt, self.request.num_top_logprobs or 0
        self.prompt_logprobs += [
            logprob_of(row, token, num_top)
            for row, token in zip(logits, prompt[first + 1 :], strict=False)
        ]

    def _rest(self) -> str:
        """Return the text that was held back; call this at the answer's end."""
        if self.text is None or self.stop.is_met:
            return ""
        rest = self.stop.add(self.text.finish())
        rest += self.stop.finish()
        if self.stop.is_met:
            self.finish_reason = "stop"
        return rest


def logprob_of(logits: Tensor, token: int, num_top: int) -> TokenLogprob:
    """Return a token's log-probability by logits (vocabulary,), and `num_top` likeliest tokens."""
    logprobs = torch.log_softmax(logits.float(), -1)
    values, ids = logprobs.topk(num_top) if num_top else (logprobs[:0], logprobs[:0].long())
    top = tuple(zip((int(i) for i in ids.tolist()), values.tolist(), strict=True))
    return TokenLogprob(token, float(logprobs[token]), top)
