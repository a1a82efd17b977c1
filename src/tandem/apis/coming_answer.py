"""One answer while it is generated, whatever the API: its parts, its token counts and its end."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from tandem.apis.answering import GenerationRequest
from tandem.dialects.arguments import json_value
from tandem.dialects.coming_call import AnswerPart
from tandem.generate.token_output import TokenLogprob, TokenOutput

End = Literal["stop", "stop_string", "length", "tool_calls"]


@dataclass(slots=True)
class Tally:
    """Token counts of one answer, updated as it is generated."""

    prompt_tokens: int = 0
    generated_tokens: int = 0
    reused_tokens: int = 0
    reasoning_tokens: int = 0
    """Generated tokens up to the end of the reasoning."""
    finish_reason: str | None = None
    stop_string: str | None = None

    def add(self, token_output: TokenOutput) -> None:
        """Update the counts from the answer's next token output, which carries totals."""
        self.generated_tokens = token_output.generated_tokens
        self.reused_tokens = token_output.reused_tokens
        self.finish_reason = token_output.finish_reason
        self.stop_string = token_output.stop_string


class ComingAnswer:
    """Turns one request's token outputs into parts of its answer; the same for every API."""

    def __init__(self, request: GenerationRequest) -> None:
        """Begin the answer to a request."""
        self._reader, self._has_one_call = request.reader, request.has_one_call
        self._num_calls = 0
        self.tally = Tally(prompt_tokens=request.prompt_tokens)

    def take(self, token_output: TokenOutput) -> list[AnswerPart]:
        """Take one token output; return the answer parts that later tokens can no longer change."""
        self.tally.add(token_output)
        parts = [part for part in self._parts(token_output) if self._is_kept(part)]
        if any(part.reasoning for part in parts):
            self.tally.reasoning_tokens = self.tally.generated_tokens
        return parts

    @property
    def end(self) -> End | None:
        """Why the answer ended; None while it goes on."""
        reason = self.tally.finish_reason
        if reason is None or reason == "length":
            return None if reason is None else "length"
        if self._num_calls:
            return "tool_calls"
        return "stop" if self.tally.stop_string is None else "stop_string"

    def _parts(self, token_output: TokenOutput) -> list[AnswerPart]:
        text = token_output.text
        if self._reader is None:
            return [AnswerPart(content=text)] if text else []
        parts = self._reader.feed(text) if text else []
        is_last = token_output.finish_reason is not None
        return parts + self._reader.finish() if is_last else parts

    def _is_kept(self, part: AnswerPart) -> bool:
        """Tell whether a part is kept, and count its tool call.

        Empty parts are dropped, and so are calls after the first if only one call is allowed.
        """
        if part.call is None and not part.arguments:
            return bool(part.content or part.reasoning)
        self._num_calls += part.call is not None
        return self._num_calls == 1 or not self._has_one_call


def arguments_object(arguments: str) -> object:
    """Return a call's arguments as an object; {"arguments": text} if they are no JSON object."""
    parsed = json_value(arguments)
    return parsed if isinstance(parsed, dict) else {"arguments": arguments}


def logprob_entry(logprob: TokenLogprob, text_of: Callable[[int], str]) -> dict[str, object]:
    """Return a token's entry in `logprobs` of OpenAI's chats; `text_of` returns a token's text."""
    one = _token(logprob.token_id, logprob.logprob, text_of)
    one["top_logprobs"] = [_token(token, value, text_of) for token, value in logprob.top]
    return one


def finite(logprob: float) -> float:
    """Return a log-probability that JSON can carry: minus infinity becomes OpenAI's -9999.0."""
    return max(logprob, -9999.0)


def _token(token: int, logprob: float, text_of: Callable[[int], str]) -> dict[str, object]:
    text = text_of(token)
    return {"token": text, "logprob": finite(logprob), "bytes": list(text.encode())}
