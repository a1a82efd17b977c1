"""Answers in the form of OpenAI's chats and completions: whole objects, and a stream's chunks."""

from collections.abc import Callable, Iterator, Mapping, Sequence

from tandem.apis.answering import GenerationRequest, new_id, now_seconds
from tandem.apis.api import Event, Reply, Surroundings
from tandem.apis.coming_answer import ComingAnswer, Tally, finite, logprob_entry
from tandem.apis.schemas import ChatRequest, CompletionRequest, Sampling, StreamOptions
from tandem.dialects.coming_call import AnswerPart, Call
from tandem.generate.token_output import TokenLogprob, TokenOutput

_TextOf = Callable[[int], str]
_LOGPROB_FIELDS = ("tokens", "token_logprobs", "top_logprobs", "text_offset")


def usage(tallies: list[Tally], num_choices: int) -> dict[str, object]:
    """Return OpenAI's usage object; `tallies` must have `num_choices` answers per prompt."""
    prompt = sum(tally.prompt_tokens for tally in tallies[::num_choices])
    generated = sum(tally.generated_tokens for tally in tallies)
    cached = sum(tally.reused_tokens for tally in tallies[::num_choices])
    reasoning = sum(tally.reasoning_tokens for tally in tallies)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": generated,
        "total_tokens": prompt + generated,
        "prompt_tokens_details": {"cached_tokens": cached},
        "completion_tokens_details": {"reasoning_tokens": reasoning},
    }


class _OpenAiReply(Reply):
    """The base of replies to chats and completions: fields that all chunks share, and the usage."""

    def __init__(self, body: Sampling, prefix: str, chunk_kind: str, model: str) -> None:
        options = body.stream_options or StreamOptions()
        self._has_usage = options.include_usage
        self._has_running_usage = options.include_usage and options.continuous_usage_stats
        self._head: dict[str, object] = {
            "id": new_id(prefix), "object": chunk_kind, "created": now_seconds(), "model": model,
        }  # fmt: skip

    def last_events(self) -> list[Event]:
        """Return a chunk with the usage if the client requested it; otherwise []."""
        return [{**self._head, "choices": [], "usage": self._usage()}] if self._has_usage else []

    def _usage(self) -> dict[str, object]:
        raise NotImplementedError

    def _chunk(self, choice: Mapping[str, object]) -> Event:
        usage = {"usage": self._usage()} if self._has_running_usage else {}
        return {**self._head, "choices": [choice], **usage}


class ChatReply(_OpenAiReply):
    """The choices of one chat answer while they are generated."""

    def __init__(
        self,
        body: ChatRequest,
        generation_requests: list[GenerationRequest],
        model: str,
    ) -> None:
        """Begin the answer to a chat; each generation request makes one choice."""
        super().__init__(body, "chatcmpl", "chat.completion.chunk", model)
        self._choices = [
            _ChatChoice(index, generation_request)
            for index, generation_request in enumerate(generation_requests)
        ]
        self._head["system_fingerprint"] = None
        if generation_requests[0].num_dropped_turns:
            self._head["dropped_turns"] = generation_requests[0].num_dropped_turns

    def arrive(self, surroundings: Surroundings) -> None:
        """Attach the function that returns a token's text."""
        for choice in self._choices:
            choice.text_of = surroundings.text_of

    def first_events(self) -> list[Event]:
        """Return the chunks that open the stream."""
        return [self._chunk(choice.first()) for choice in self._choices]

    def take(self, index: int, token_output: TokenOutput) -> list[Event]:
        """Add a token output to choice `index`; return the resulting chunks."""
        return [self._chunk(part) for part in self._choices[index].take(token_output)]

    def whole(self) -> dict[str, object]:
        """Return the answer as one object."""
        choices = [choice.whole() for choice in self._choices]
        head = {**self._head, "object": "chat.completion"}
        return {**head, "choices": choices, "usage": self._usage()}

    def _usage(self) -> dict[str, object]:
        return usage([choice.tally for choice in self._choices], len(self._choices))


class _ChatChoice:
    """One choice of a chat's answer while it is generated."""

    text_of: _TextOf

    def __init__(self, index: int, generation_request: GenerationRequest) -> None:
        self._index = index
        self._answer = ComingAnswer(generation_request)
        self.tally = self._answer.tally
        self._text = {"content": "", "reasoning_content": ""}
        self._calls: list[dict[str, object]] = []
        self._latest_function: dict[str, str] = {}
        self._logprobs: list[dict[str, object]] = []

    def first(self) -> dict[str, object]:
        """Return the first delta of the choice in a stream."""
        return self._part({"role": "assistant", "content": ""})

    def take(self, token_output: TokenOutput) -> Iterator[dict[str, object]]:
        """Add a token output; yield this choice's entries in the resulting chunks.

        Each delta is in one entry; the first also has the token's log-probabilities. The last
        token's deltas are followed by an entry with the finish reason.
        """
        logprob = self._logprob(token_output)
        deltas = [self._delta(part) for part in self._answer.take(token_output)]
        for delta in deltas or ([{}] if logprob is not None else []):
            yield self._part(delta, logprobs=logprob)
            logprob = None
        if token_output.finish_reason is not None:
            yield self._part({}, finish_reason=self._finish_reason)

    def whole(self) -> dict[str, object]:
        """Return the choice's entry in an answer that is not streamed."""
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

    def _delta(self, part: AnswerPart) -> dict[str, object]:
        if part.call is not None:
            return self._call_delta(part.call)
        if part.arguments:
            self._latest_function["arguments"] += part.arguments
            more = {"index": len(self._calls) - 1, "function": {"arguments": part.arguments}}
            return {"tool_calls": [more]}
        name, text = (
            ("reasoning_content", part.reasoning) if part.reasoning else ("content", part.content)
        )
        self._text[name] += text
        return {name: text}

    def _call_delta(self, call: Call) -> dict[str, object]:
        function: dict[str, str] = {"name": call.name, "arguments": call.arguments}
        written: dict[str, object] = {"id": new_id("call"), "type": "function"}
        self._calls.append({**written, "function": function})
        self._latest_function = function
        index = len(self._calls) - 1
        return {"tool_calls": [{"index": index, **written, "function": {**function}}]}

    @property
    def _finish_reason(self) -> str | None:
        end = self._answer.end
        return "stop" if end == "stop_string" else end

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
        one = logprob_entry(token_output.logprob, self.text_of)
        self._logprobs.append(one)
        return one


class CompletionReply(_OpenAiReply):
    """The answers to one completion request's prompts while they are generated."""

    def __init__(
        self,
        body: CompletionRequest,
        generation_requests: list[GenerationRequest],
        model: str,
    ) -> None:
        """Begin the answers; each prompt must have one generation request per choice."""
        super().__init__(body, "cmpl", "text_completion", model)
        self._echoes, self._num_choices = [one.echo for one in generation_requests], body.n or 1
        self._tallies = [Tally(prompt_tokens=one.prompt_tokens) for one in generation_requests]
        self._texts = ["" for _ in generation_requests]
        self._logprobs = [_Logprobs(one.request.prompt) for one in generation_requests]

    def arrive(self, surroundings: Surroundings) -> None:
        """Attach the function that returns a token's text."""
        for logprobs in self._logprobs:
            logprobs.text_of = surroundings.text_of

    def take(self, index: int, token_output: TokenOutput) -> list[Event]:
        """Add a token output to answer `index`; return its chunk, or [] if it adds nothing."""
        is_first = self._tallies[index].generated_tokens == 0
        self._tallies[index].add(token_output)
        logprobs = self._logprobs[index].take(token_output)
        text = (self._echoes[index] if is_first else "") + token_output.text
        self._texts[index] += text
        if not text and logprobs is None and token_output.finish_reason is None:
            return []
        choice = {
            "index": index,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": token_output.finish_reason,
        }
        return [self._chunk(choice)]

    def whole(self) -> dict[str, object]:
        """Return all answers as one object."""
        choices: list[dict[str, object]] = [
            {
                "index": index,
                "text": text,
                "logprobs": self._logprobs[index].whole(),
                "finish_reason": self._tallies[index].finish_reason,
            }
            for index, text in enumerate(self._texts)
        ]
        return {**self._head, "choices": choices, "usage": self._usage()}

    def _usage(self) -> dict[str, object]:
        return usage(self._tallies, self._num_choices)


class _Logprobs:
    """The log-probabilities of one completion: first the prompt's tokens, then the answer's."""

    text_of: _TextOf

    def __init__(self, prompt: Sequence[int]) -> None:
        self._prompt = prompt
        self._offset = 0
        self._all: dict[str, list[object]] = {name: [] for name in _LOGPROB_FIELDS}

    def take(self, token_output: TokenOutput) -> dict[str, list[object]] | None:
        """Return the log-probabilities that a token output adds; None if it has none."""
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
        """Return all log-probabilities; None if the client requested none."""
        return self._all if self._all["tokens"] else None

    def _add(self, new: dict[str, list[object]], token: int, logprob: TokenLogprob | None) -> None:
        text = self.text_of(token)
        new["tokens"].append(text)
        new["token_logprobs"].append(None if logprob is None else finite(logprob.logprob))
        new["top_logprobs"].append(None if logprob is None else self._top(text, logprob))
        new["text_offset"].append(self._offset)
        self._offset += len(text)

    def _top(self, text: str, logprob: TokenLogprob) -> dict[str, float]:
        """Return the log-probabilities of the likeliest tokens and of the chosen token, by text.

        If several tokens have the same text, the likeliest of them counts.
        """
        top: dict[str, float] = {}
        for token, value in logprob.top:
            top.setdefault(self.text_of(token), finite(value))
        top.setdefault(text, finite(logprob.logprob))
        return top
