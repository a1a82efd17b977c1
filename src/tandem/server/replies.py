"""Answers in OpenAI's form: whole objects, and the chunks of a stream."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from tandem.foreign_types import Tokenizer
from tandem.generate.token_output import TokenLogprob, TokenOutput
from tandem.server.answering import GenerationRequest, new_id, now_seconds
from tandem.server.chat import AnswerPart, Call

_LOGPROB_FIELDS = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
DONE = b"data: [DONE]\n\n"


def event(data: object) -> bytes:
    """Return one server-sent event."""
    return (
        b"data: " + json.dumps(data, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"
    )


@dataclass(slots=True)
class Tally:
    """What is counted of one answer while it comes."""

    prompt_tokens: int = 0
    generated_tokens: int = 0
    reused_tokens: int = 0
    finish_reason: str | None = None

    def add(self, token_output: TokenOutput) -> None:
        """Count one token."""
        self.generated_tokens = token_output.generated_tokens
        self.reused_tokens = token_output.reused_tokens
        self.finish_reason = token_output.finish_reason


def usage(tallies: list[Tally], num_choices: int) -> dict[str, object]:
    """Return the usage object of the answers to one or several prompts, each with its choices."""
    prompt = sum(tally.prompt_tokens for tally in tallies[::num_choices])
    generated = sum(tally.generated_tokens for tally in tallies)
    cached = sum(tally.reused_tokens for tally in tallies[::num_choices])
    return {
        "prompt_tokens": prompt,
        "completion_tokens": generated,
        "total_tokens": prompt + generated,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


class ChatReply:
    """The choices of one chat answer as they come."""

    def __init__(
        self,
        generation_requests: list[GenerationRequest],
        model: str,
        tokenizer: Tokenizer,
        *,
        has_running_usage: bool = False,
    ) -> None:
        """Begin the answer to a chat: one generation request per choice.

        `has_running_usage` reports with every chunk how many tokens there are so far.
        """
        self._has_running_usage = has_running_usage
        self._choices = [
            _ChatChoice(index, generation_request, tokenizer)
            for index, generation_request in enumerate(generation_requests)
        ]
        self._head = {
            "id": new_id("chatcmpl"),
            "object": "chat.completion.chunk",
            "created": now_seconds(),
            "model": model,
            "system_fingerprint": None,
        }
        if generation_requests[0].num_dropped_turns:
            self._head["dropped_turns"] = generation_requests[0].num_dropped_turns

    def first_chunks(self) -> list[dict[str, object]]:
        """Return the chunks that begin the stream."""
        return [self._chunk(choice.first()) for choice in self._choices]

    def take(self, index: int, token_output: TokenOutput) -> list[dict[str, object]]:
        """Take one token of a choice; return the chunks that follow from it."""
        return [self._chunk(part) for part in self._choices[index].take(token_output)]

    def usage_chunk(self) -> dict[str, object]:
        """Return the chunk that carries the usage."""
        return {**self._head, "choices": [], "usage": self._usage()}

    def whole(self) -> dict[str, object]:
        """Return the answer as one object."""
        choices = [choice.whole() for choice in self._choices]
        head = {**self._head, "object": "chat.completion"}
        return {**head, "choices": choices, "usage": self._usage()}

    def _usage(self) -> dict[str, object]:
        return usage([choice.tally for choice in self._choices], len(self._choices))

    def _chunk(self, choice: dict[str, object]) -> dict[str, object]:
        usage = {"usage": self._usage()} if self._has_running_usage else {}
        return {**self._head, "choices": [choice], **usage}


class _ChatChoice:
    """One choice as it comes."""

    def __init__(
        self,
        index: int,
        generation_request: GenerationRequest,
        tokenizer: Tokenizer,
    ) -> None:
        self._index, self._question, self._tokenizer = index, generation_request, tokenizer
        self.tally = Tally(prompt_tokens=generation_request.prompt_tokens)
        self._text = {"content": "", "reasoning_content": ""}
        self._calls: list[dict[str, object]] = []
        self._logprobs: list[dict[str, object]] = []

    def first(self) -> dict[str, object]:
        """Return what begins the choice in a stream."""
        return self._part({"role": "assistant", "content": ""})

    def take(self, token_output: TokenOutput) -> Iterator[dict[str, object]]:
        """Yield the deltas that follow from a token, its log-probabilities first; then the end."""
        self.tally.add(token_output)
        logprob = self._logprob(token_output)
        deltas = [d for part in self._parts(token_output) if (d := self._delta(part)) is not None]
        for delta in deltas or ([{}] if logprob is not None else []):
            yield self._part(delta, logprobs=logprob)
            logprob = None
        if token_output.finish_reason is not None:
            yield self._part({}, finish_reason=self._finish_reason)

    def whole(self) -> dict[str, object]:
        """Return the choice as an answer that is not streamed has it."""
        content, reasoning = self._text["content"], self._text["reasoning_content"]
        message: dict[str, object] = {
            "role": "assistant",
            "content": None if self._calls and not content else content,
            "refusal": None,
        }
        if reasoning:
            message["reasoning_content"] = reasoning
        if self._calls:
            message["tool_calls"] = self._calls
        return {
            "index": self._index,
            "message": message,
            "logprobs": {"content": self._logprobs, "refusal": None} if self._logprobs else None,
            "finish_reason": self._finish_reason,
        }

    def _parts(self, token_output: TokenOutput) -> list[AnswerPart]:
        reader = self._question.reader
        if reader is None:
            return [AnswerPart(content=token_output.text)] if token_output.text else []
        parts = reader.feed(token_output.text) if token_output.text else []
        return parts + reader.finish() if token_output.finish_reason is not None else parts

    def _delta(self, part: AnswerPart) -> dict[str, object] | None:
        if part.call is not None:
            return self._call_delta(part.call)
        name, text = (
            ("reasoning_content", part.reasoning) if part.reasoning else ("content", part.content)
        )
        if not text:
            return None
        self._text[name] += text
        return {name: text}

    def _call_delta(self, call: Call) -> dict[str, object] | None:
        if self._calls and self._question.has_one_call:
            return None
        written: dict[str, object] = {
            "id": new_id("call"),
            "type": "function",
            "function": {"name": call.name, "arguments": call.arguments},
        }
        self._calls.append(written)
        return {"tool_calls": [{"index": len(self._calls) - 1, **written}]}

    @property
    def _finish_reason(self) -> str | None:
        reason = self.tally.finish_reason
        return "tool_calls" if self._calls and reason == "stop" else reason

    def _part(
        self, delta: dict[str, object], *, finish_reason: str | None = None, logprobs: object = None
    ) -> dict[str, object]:
        return {
            "index": self._index,
            "delta": delta,
            "logprobs": None if logprobs is None else {"content": [logprobs], "refusal": None},
            "finish_reason": finish_reason,
        }

    def _logprob(self, token_output: TokenOutput) -> dict[str, object] | None:
        if token_output.logprob is None:
            return None
        one = self._token(token_output.logprob.token_id, token_output.logprob.logprob)
        one["top_logprobs"] = [
            self._token(token, value) for token, value in token_output.logprob.top
        ]
        self._logprobs.append(one)
        return one

    def _token(self, token: int, logprob: float) -> dict[str, object]:
        text = self._tokenizer.decode([token])
        return {"token": text, "logprob": _finite(logprob), "bytes": list(text.encode())}


@dataclass(slots=True)
class CompletionReply:
    """The answers to one completion request's prompts as they come."""

    generation_requests: list[GenerationRequest]
    model: str
    tokenizer: Tokenizer
    num_choices: int = 1
    """Per prompt."""
    has_running_usage: bool = False
    """Whether every chunk reports how many tokens there are so far."""
    tallies: list[Tally] = field(default_factory=list)
    reply_id: str = field(default_factory=lambda: new_id("cmpl"))
    created: int = field(default_factory=now_seconds)
    _texts: list[str] = field(default_factory=list)
    _logprobs: list["_Logprobs"] = field(default_factory=list)

    def __post_init__(self) -> None:
        for generation_request in self.generation_requests:
            self.tallies.append(Tally(prompt_tokens=generation_request.prompt_tokens))
            self._texts.append("")
            self._logprobs.append(_Logprobs(self.tokenizer, generation_request.fields["prompt"]))

    def take(self, index: int, token_output: TokenOutput) -> dict[str, object] | None:
        """Take one token of one prompt's answer; return its chunk, if there is something to say."""
        is_first = self.tallies[index].generated_tokens == 0
        self.tallies[index].add(token_output)
        logprobs = self._logprobs[index].take(token_output)
        text = (self.generation_requests[index].echo if is_first else "") + token_output.text
        self._texts[index] += text
        if not text and logprobs is None and token_output.finish_reason is None:
            return None
        choice = {
            "index": index,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": token_output.finish_reason,
        }
        usage = {"usage": self._usage()} if self.has_running_usage else {}
        return {**self._object([choice]), **usage}

    def whole(self) -> dict[str, object]:
        """Return all answers as one object."""
        choices: list[dict[str, object]] = [
            {
                "index": index,
                "text": text,
                "logprobs": self._logprobs[index].whole(),
                "finish_reason": self.tallies[index].finish_reason,
            }
            for index, text in enumerate(self._texts)
        ]
        return {**self._object(choices), "usage": self._usage()}

    def usage_chunk(self) -> dict[str, object]:
        """Return the chunk that carries the usage."""
        return {**self._object([]), "usage": self._usage()}

    def _usage(self) -> dict[str, object]:
        return usage(self.tallies, self.num_choices)

    def _object(self, choices: list[dict[str, object]]) -> dict[str, object]:
        return {
            "id": self.reply_id,
            "object": "text_completion",
            "created": self.created,
            "model": self.model,
            "choices": choices,
        }


class _Logprobs:
    """The log-probabilities of one answer to a completion request, the prompt's before its own."""

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int]) -> None:
        self._tokenizer, self._prompt = tokenizer, prompt
        self._offset = 0
        self._all: dict[str, list[object]] = {name: [] for name in _LOGPROB_FIELDS}

    def take(self, token_output: TokenOutput) -> dict[str, list[object]] | None:
        """Take one token; return what is new, if anything is."""
        tokens = list(zip(self._prompt, token_output.prompt_logprobs or (), strict=False))
        if token_output.logprob is not None:
            tokens.append((token_output.logprob.token_id, token_output.logprob))
        if not tokens:
            return None
        new: dict[str, list[object]] = {name: [] for name in _LOGPROB_FIELDS}
        for token, logprob in tokens:
            self._add(new, token, logprob)
        for name, values in new.items():
            self._all[name] += values
        return new

    def whole(self) -> dict[str, list[object]] | None:
        """Return all of them; None if none were asked for."""
        return self._all if self._all["tokens"] else None

    def _add(self, new: dict[str, list[object]], token: int, logprob: TokenLogprob | None) -> None:
        text = self._tokenizer.decode([token])
        new["tokens"].append(text)
        new["token_logprobs"].append(None if logprob is None else _finite(logprob.logprob))
        new["top_logprobs"].append(None if logprob is None else self._top(text, logprob))
        new["text_offset"].append(self._offset)
        self._offset += len(text)

    def _top(self, text: str, logprob: TokenLogprob) -> dict[str, float]:
        """Return the likeliest tokens and the one that came; of those of one text, the likelier."""
        top: dict[str, float] = {}
        for token, value in logprob.top:
            top.setdefault(self._tokenizer.decode([token]), _finite(value))
        top.setdefault(text, _finite(logprob.logprob))
        return top


def _finite(logprob: float) -> float:
    """Return a log-probability that JSON can carry: OpenAI's value for what is ruled out."""
    return max(logprob, -9999.0)
