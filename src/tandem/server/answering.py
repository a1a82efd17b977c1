"""From a checked body to what the decode process is asked for."""

import json
import random
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tandem.generate.sampling import SamplingOptions
from tandem.server.chat import CALL, END_CALL, AnswerReader, ChatFormat
from tandem.server.errors import ApiError
from tandem.server.grammar import call_grammar, json_grammar
from tandem.server.messages import ModelInfo
from tandem.server.schemas import (
    ChatRequest,
    CompletionRequest,
    Message,
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

    def chat(self, body: ChatRequest, info: ModelInfo) -> Question:
        """Return the question of a chat; raises `ApiError` or `ConfigError` for a bad one."""
        tools = _tools(body)
        grammar = self._grammar(body, tools)
        prompt = self._format.prompt(
            [_turn(message) for message in body.messages],
            [
                tool.model_dump(exclude_none=True, exclude={"function": {"strict"}})
                for tool in tools
            ],
            _template_options(body),
            must_not_think=grammar is not None,
        )
        reader = self._format.reader(prompt, has_tools=bool(tools))
        fields = self._fields(body, prompt.ids, info, body.max_completion_tokens)
        fields["grammar"] = grammar
        fields["keeps_special"] = reader is not None and self._format.keeps_special
        if body.logprobs:
            fields["num_top_logprobs"] = body.top_logprobs or 0
        elif body.top_logprobs:
            raise ApiError(400, "top_logprobs needs logprobs: true", param="top_logprobs")
        return Question(
            fields=fields,
            prompt_text=prompt.text,
            reader=reader,
            has_one_call=body.parallel_tool_calls is False,
        )

    def completions(self, body: CompletionRequest, info: ModelInfo) -> list[Question]:
        """Return the questions of a completion request, one per prompt."""
        prompts: Any = body.prompt
        is_one = isinstance(prompts, str) or isinstance(prompts[0], int)
        questions = []
        for prompt in [prompts] if is_one else prompts:
            is_text = isinstance(prompt, str)
            ids = self._tokenizer(prompt)["input_ids"] if is_text else prompt
            fields = self._fields(body, list(ids), info, None)
            fields["num_top_logprobs"] = body.logprobs
            text = prompt if isinstance(prompt, str) else str(prompt)
            questions.append(Question(fields=fields, prompt_text=text))
        return questions

    def _fields(
        self, body: Sampling, ids: list[int], info: ModelInfo, max_tokens: int | None
    ) -> dict[str, Any]:
        room = self._room(ids, info)
        options = SamplingOptions(
            max_new_tokens=min(max_tokens or body.max_tokens or room, room),
            temperature=body.temperature,
            top_p=None if body.top_p is None else max(body.top_p, 1e-6),
            top_k=_top_k(body.top_k, info),
            min_p=body.min_p or None,
            repetition_penalty=body.repetition_penalty,
            seed=None if body.seed is None else body.seed % _SEEDS,
            stop=_stop(body.stop),
        )
        return {"prompt": tuple(ids), "options": options}

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

    def _grammar(self, body: ChatRequest, tools: list[Tool]) -> str | None:
        """Return the grammar that the answer must follow, if there is one."""
        choice, form = body.tool_choice, body.response_format
        if isinstance(choice, ToolChoice) or choice == "required":
            return self._call_grammar(choice, tools)
        if form is None or form.type == "text":
            return None
        if form.type == "json_object":
            return json_grammar(_ANY_OBJECT)
        if form.json_schema is None:
            raise ApiError(
                400, "response_format json_schema needs json_schema", param="response_format"
            )
        return json_grammar(form.json_schema.json_schema or _ANY_OBJECT)

    def _call_grammar(self, choice: ToolChoice | str, tools: list[Tool]) -> str:
        if not tools:
            raise ApiError(
                400, "tool_choice asks for a call, but there are no tools", param="tools"
            )
        wanted = choice.function.name if isinstance(choice, ToolChoice) else None
        rules = [
            (tool.function.name, tool.function.parameters or _ANY_OBJECT)
            for tool in tools
            if wanted in (None, tool.function.name)
        ]
        if not rules:
            raise ApiError(400, f"tool_choice names {wanted!r}, which is none of the tools")
        return call_grammar(rules, CALL, END_CALL)


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
