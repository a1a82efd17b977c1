"""From a checked body to what the decode process is asked for."""

import dataclasses
import json
import random
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tandem.core.errors import ConfigError
from tandem.generate.penalties import Penalties
from tandem.generate.sampling import SamplingOptions
from tandem.server.chat import AnswerReader, ChatFormat, ChatPrompt
from tandem.server.errors import ApiError
from tandem.server.grammar import call_grammar, free_grammar, json_grammar
from tandem.server.messages import ModelInfo
from tandem.server.schemas import (
    ChatRequest,
    CompletionRequest,
    Message,
    ResponseFormat,
    Sampling,
    Tool,
    ToolChoice,
)

_SEEDS = 2**62
_ANY_OBJECT = {"type": "object"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """One prompt, as `EngineClient.submit` takes it, and how its answer is read."""

    fields: dict[str, Any]
    prompt_text: str
    reader: AnswerReader | None = None
    has_one_call: bool = False
    """Whether more calls than one are dropped."""

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the prompt."""
        return len(self.fields["prompt"])


class Questions:
    """Makes questions for one model."""

    def __init__(self, tokenizer: Any, *, context: int | None) -> None:
        """`context` limits prompt and answer together, below the model's own limit."""
        self._tokenizer = tokenizer
        self._format = ChatFormat(tokenizer)
        self._context = context

    def chat(self, body: ChatRequest, info: ModelInfo) -> list[Question]:
        """Return the questions of a chat, one per choice.

        Raises `ApiError` or `ConfigError` for a bad one.
        """
        tools = _tools(body)
        ruled = self._ruled(body, tools)
        is_ruled = ruled is not None
        prompt = self._format.prompt(
            [_turn(message) for message in body.messages],
            [
                tool.model_dump(exclude_none=True, exclude={"function": {"strict"}})
                for tool in tools
            ],
            _template_options(body),
            must_not_think=is_ruled,
        )
        fields = self._fields(body, prompt.ids, info, body.max_completion_tokens)
        fields["grammar"] = ruled or self._free(body, tools, prompt)
        fields["keeps_special"] = self._format.keeps_special(has_tools=bool(tools))
        if body.logprobs:
            fields["num_top_logprobs"] = body.top_logprobs or 0
        elif body.top_logprobs:
            raise ApiError(400, "top_logprobs needs logprobs: true", param="top_logprobs")
        return [
            Question(
                fields=one,
                prompt_text=prompt.text,
                reader=self._format.reader(prompt, has_tools=bool(tools), is_ruled=is_ruled),
                has_one_call=body.parallel_tool_calls is False,
            )
            for one in _choices(fields, body.n)
        ]

    def completions(self, body: CompletionRequest, info: ModelInfo) -> list[Question]:
        """Return the questions of a completion request, one per prompt and choice."""
        prompts: Any = body.prompt
        is_one = isinstance(prompts, str) or isinstance(prompts[0], int)
        questions = []
        for prompt in [prompts] if is_one else prompts:
            is_text = isinstance(prompt, str)
            ids = self._tokenizer(prompt)["input_ids"] if is_text else prompt
            fields = self._fields(body, list(ids), info, None)
            fields["num_top_logprobs"] = body.logprobs
            text = prompt if isinstance(prompt, str) else str(prompt)
            questions += [Question(fields=f, prompt_text=text) for f in _choices(fields, body.n)]
        return questions

    def _fields(
        self, body: Sampling, ids: list[int], info: ModelInfo, max_tokens: int | None
    ) -> dict[str, Any]:
        room = self._room(ids, info)
        options = SamplingOptions(
            max_new_tokens=min(_wish(max_tokens) or _wish(body.max_tokens) or room, room),
            temperature=body.temperature,
            top_p=None if body.top_p is None else max(body.top_p, 1e-6),
            top_k=_top_k(body.top_k, info),
            min_p=body.min_p or None,
            repetition_penalty=body.repetition_penalty,
            seed=None if body.seed is None else body.seed % _SEEDS,
            stop=_stop(body.stop),
        )
        return {"prompt": tuple(ids), "options": options, "penalties": _penalties(body, info)}

    def _room(self, ids: list[int], info: ModelInfo) -> int:
        """Return how long an answer may be; checks what the decode process would refuse."""
        if not ids:
            raise ApiError(400, "the prompt is empty; give some text")
        unknown = next((token for token in ids if not 0 <= token < info.vocabulary), None)
        if unknown is not None:
            raise ApiError(
                400,
                f"token id {unknown} is unknown; this model's are 0 to {info.vocabulary - 1}",
                param="prompt",
            )
        limits = [limit for limit in (self._context, info.context) if limit is not None]
        if not limits:
            return 2**31
        if len(ids) >= min(limits):
            raise ApiError(
                400,
                f"the prompt has {len(ids)} tokens, and prompt and answer together may have "
                f"{min(limits)}; shorten the prompt",
                code="context_length_exceeded",
            )
        return min(limits) - len(ids)

    def _ruled(self, body: ChatRequest, tools: list[Tool]) -> str | None:
        """Return the grammar that rules the answer from its first word, if there is one."""
        choice, schema = body.tool_choice, _schema(body.response_format)
        if isinstance(choice, ToolChoice) or choice == "required":
            return call_grammar(_wanted(choice, tools), self._format.marks)
        if schema is None:
            return None
        if tools:
            return call_grammar(_followed(tools), self._format.marks, or_json=schema)
        return json_grammar(schema)

    def _free(self, body: ChatRequest, tools: list[Tool], prompt: ChatPrompt) -> str | None:
        """Return the grammar that rules calls alone, where the form of a call is known."""
        if not tools or not self._format.has_our_marks:
            return None
        return free_grammar(
            _followed(tools),
            self._format.marks,
            is_thinking=prompt.is_thinking,
            can_think=self._format.thinks,
            has_one_call=body.parallel_tool_calls is False,
        )


def _schema(form: ResponseFormat | None) -> Mapping[str, Any] | None:
    """Return the schema that an answer must follow; None: none."""
    if form is None or form.type == "text":
        return None
    if form.type == "json_object":
        return _ANY_OBJECT
    if form.json_schema is None:
        raise ApiError(
            400, "response_format json_schema needs json_schema", param="response_format"
        )
    return form.json_schema.json_schema or _ANY_OBJECT


def _wanted(choice: ToolChoice | str, tools: list[Tool]) -> list[tuple[str, Mapping[str, Any]]]:
    """Return (name, schema) of the tools of which one must be called."""
    if not tools:
        raise ApiError(400, "tool_choice asks for a call, but there are no tools", param="tools")
    wanted = choice.function.name if isinstance(choice, ToolChoice) else None
    rules: list[tuple[str, Mapping[str, Any]]] = [
        (tool.function.name, tool.function.parameters or _ANY_OBJECT)
        for tool in tools
        if wanted in (None, tool.function.name)
    ]
    if not rules:
        raise ApiError(400, f"tool_choice names {wanted!r}, which is none of the tools")
    return rules


def _followed(tools: list[Tool]) -> list[tuple[str, Mapping[str, Any]]]:
    """Return (name, schema) of tools that may be called.

    A schema that no grammar follows lets any object pass, unless it was said to be strict.
    """
    found: list[tuple[str, Mapping[str, Any]]] = []
    for tool in tools:
        schema = tool.function.parameters or _ANY_OBJECT
        try:
            json_grammar(schema)
        except ConfigError:
            if tool.function.strict:
                raise
            schema = _ANY_OBJECT
        found.append((tool.function.name, schema))
    return found


def _tools(body: ChatRequest) -> list[Tool]:
    return [] if body.tool_choice == "none" else body.tools or []


def _turn(message: Message) -> dict[str, Any]:
    """Return a message as chat templates read it."""
    content = message.content
    if isinstance(content, list):
        content = "\n".join(part.text for part in content)
    role = "system" if message.role == "developer" else message.role
    turn: dict[str, Any] = {"role": role, "content": content or ""}
    for name in ("name", "tool_call_id", "reasoning_content"):
        if (value := getattr(message, name)) is not None:
            turn[name] = value
    if message.tool_calls:
        turn["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {
                    "name": call.function.name,
                    "arguments": _parsed(call.function.arguments),
                },
            }
            for call in message.tool_calls
        ]
    return turn


def _parsed(arguments: str) -> Any:
    """Return the object that arguments write; templates write it anew in the model's own form."""
    try:
        return json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments


def _template_options(body: ChatRequest) -> Mapping[str, Any]:
    options = dict(body.chat_template_kwargs or {})
    reserved = {"messages", "tools", "tokenize", "add_generation_prompt", "chat_template"}
    for name in options:
        if name in reserved or not name.isidentifier():
            raise ApiError(
                400,
                f"chat_template_kwargs must not set {name[:64]!r}",
                param="chat_template_kwargs",
            )
    if body.reasoning_effort is not None:
        options.setdefault("reasoning_effort", body.reasoning_effort)
        if body.reasoning_effort == "none":
            options.setdefault("enable_thinking", False)
    return options


def _choices(fields: dict[str, Any], n: int | None) -> list[dict[str, Any]]:
    """Return the fields of each of n choices, whose seeds follow one another."""
    options = fields["options"]
    return [
        fields
        if i == 0 or options.seed is None
        else {**fields, "options": dataclasses.replace(options, seed=(options.seed + i) % _SEEDS)}
        for i in range(n or 1)
    ]


def _wish(max_tokens: int | None) -> int | None:
    """Return how long an answer may be; -1 is what some clients say for no limit."""
    return None if max_tokens == -1 else max_tokens


def _penalties(body: Sampling, info: ModelInfo) -> Penalties | None:
    """Return what changes scores; None if nothing does."""
    bias = tuple((int(token), value) for token, value in (body.logit_bias or {}).items())
    unknown = next((token for token, _ in bias if token >= info.vocabulary), None)
    if unknown is not None:
        raise ApiError(
            400,
            f"logit_bias holds token id {unknown}; this model's are 0 to {info.vocabulary - 1}",
            param="logit_bias",
        )
    presence, frequency = body.presence_penalty or 0.0, body.frequency_penalty or 0.0
    if not (presence or frequency or bias):
        return None
    return Penalties(presence=presence, frequency=frequency, bias=bias)


def _top_k(top_k: int | None, info: ModelInfo) -> int | None:
    """Return how many tokens are drawn from; 0 and -1 mean all of them."""
    return top_k if top_k is None or top_k > 0 else info.vocabulary


def _stop(stop: str | list[str] | None) -> tuple[str, ...]:
    return () if stop is None else (stop,) if isinstance(stop, str) else tuple(stop)


def new_id(prefix: str) -> str:
    """Return an id that no other answer has."""
    return f"{prefix}-{random.SystemRandom().getrandbits(96):024x}"


def now_seconds() -> int:
    """Return the time as OpenAI's objects carry it."""
    return int(time.time())
