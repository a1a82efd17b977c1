"""The request bodies: OpenAI's fields, and those of vLLM and llama.cpp that Tandem follows.

A field that would change the answer and that Tandem does not follow is accepted only with its
neutral value; `reading` ignores or refuses unknown fields. Fields named like those of
`SamplingOptions` are passed on unchanged.
"""

import dataclasses
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from tandem.apis.reading import Body, Unsupported, sentence
from tandem.generate.request import Request
from tandem.generate.sampling import SamplingOptions

_Seed = Annotated[int, Field(ge=-(2**63), lt=2**63)]
_Stop = Annotated[str, Field(min_length=1, max_length=256)]
_Json = dict[str, object]
_TokenId = Annotated[str, Field(pattern=r"^[0-9]{1,9}$")]
_Bias = Annotated[float, Field(ge=-100, le=100)]
# Some clients send -1 for "as many as fit".
_MaxTokens = Annotated[int, Field(ge=1, le=2**31)] | Literal[-1]
_MaxTokensOrNone = Annotated[int, Field(ge=0, le=2**31)] | Literal[-1]
_Budget = Annotated[int, Field(ge=0, le=2**31)]
_Pattern = Annotated[str, Field(min_length=1, max_length=65536)]
_Choices = Annotated[list[_Stop], Field(min_length=1, max_length=1024)]
SEEDS = 2**62
_OPTIONS = {field.name for field in dataclasses.fields(SamplingOptions)}
_TIERS = {"priority": -1, "flex": 1}

_UNSUPPORTED = {
    "best_of": Unsupported((1,), "ask for several answers with n, and choose among them"),
    "suffix": Unsupported(("",), "this server's model continues texts and does not fill gaps"),
    "use_beam_search": Unsupported((False,), "leave it out"),
    "verbosity": Unsupported(("medium",), "say in the prompt how long the answer should be"),
    "audio": Unsupported((), "this server's model writes text only"),
    "functions": Unsupported(([],), "describe them in tools"),
    "function_call": Unsupported(("none", "auto"), "name the tool in tool_choice"),
    "web_search_options": Unsupported((), "search yourself, with a tool"),
    "prompt_embeds": Unsupported((), "send the prompt as text or token ids"),
}
_UNSUPPORTED_IN_MESSAGES = {
    "audio": Unsupported((), "this server's model reads text only"),
    "function_call": Unsupported((), "send it in tool_calls"),
}


class StreamOptions(Body):
    """What a stream carries besides text."""

    include_usage: bool = False
    include_obfuscation: bool = False
    continuous_usage_stats: bool = False
    """Whether every chunk carries the usage so far."""


class JsonSchema(Body):
    """The JSON schema that the answer must follow."""

    name: str = Field("answer", max_length=128)
    description: str | None = None
    json_schema: _Json | None = Field(None, alias="schema")
    strict: bool | None = None


class ResponseFormat(Body):
    """The format of the answer: text, JSON or a JSON schema."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None
    outer_schema: _Json | None = Field(None, alias="schema")
    """The schema, where llama.cpp expects it: beside `type`."""


class StructuredOutputs(Body):
    """The constraint on an answer in vLLM's form; at most one of these fields may be set."""

    json_schema: _Json | str | None = Field(None, alias="json")
    json_object: bool | None = None
    regex: _Pattern | None = None
    choice: _Choices | None = None
    grammar: _Pattern | None = None


class RequestBody(Body):
    """The fields that the bodies of all endpoints share."""

    model: str | None = Field(None, max_length=512)
    stream: bool | None = None

    @property
    def is_stream(self) -> bool:
        """Whether the answer is streamed."""
        return bool(self.stream)

    @property
    def earlier_id(self) -> str | None:
        """The id of the response that this request continues; None for a new conversation."""
        return None

    @property
    def num_answers(self) -> int:
        """The number of generation requests for this body."""
        return 1


class Sampling(RequestBody):
    """The fields that chats and completions share: sampling, grammars, and the answer's form."""

    unsupported = _UNSUPPORTED

    stream_options: StreamOptions | None = None
    max_tokens: _MaxTokensOrNone | None = None
    n_predict: _MaxTokensOrNone | None = None
    min_tokens: int | None = Field(None, ge=0, le=2**31)
    ignore_eos: bool | None = None
    stop_token_ids: Annotated[list[int], Field(max_length=1024)] | None = None
    skip_special_tokens: bool | None = None
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, ge=0, le=1)
    top_k: int | None = Field(None, ge=-1, le=2**31)
    min_p: float | None = Field(None, ge=0, le=1)
    repetition_penalty: float | None = Field(None, gt=0, le=10)
    repeat_penalty: float | None = Field(None, gt=0, le=10)
    seed: _Seed | None = None
    stop: _Stop | Annotated[list[_Stop], Field(max_length=16)] | None = None
    n: int | None = Field(None, ge=1, le=16)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    speculative: Literal["auto", "none"] | None = None
    priority: int | None = Field(None, ge=-(2**31), lt=2**31)
    """Requests with lower numbers run first, as in vLLM."""
    logit_bias: Annotated[dict[_TokenId, _Bias], Field(max_length=1024)] | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: _Json | str | None = None
    guided_regex: _Pattern | None = None
    guided_choice: _Choices | None = None
    guided_grammar: _Pattern | None = None
    json_schema: _Json | None = None
    grammar: _Pattern | None = None
    user: str | None = Field(None, max_length=512)
    safety_identifier: str | None = Field(None, max_length=512)
    metadata: dict[str, str] | None = Field(None, max_length=16)
    store: bool | None = None
    service_tier: Literal["auto", "default", "flex", "scale", "priority"] | None = None
    prompt_cache_key: str | None = Field(None, max_length=512)
    prompt_cache_retention: str | None = Field(None, max_length=64)

    @property
    def num_answers(self) -> int:
        """The number of generation requests for this body: one per choice."""
        return self.n or 1

    @property
    def max_answer_tokens(self) -> int | None:
        """The most tokens that the answer may have; None: only the context limits it."""
        return _first(self.max_tokens, self.n_predict)

    def request(self, ids: Sequence[int], room: int) -> Request:
        """Return the request for a prompt of token ids; its answer has at most `room` tokens."""
        most = self.max_answer_tokens
        return Request(
            prompt=tuple(ids),
            options=self._options(max(1, room if most is None else min(most, room))),
            is_prompt_only=most == 0,
            keeps_special=self.skip_special_tokens is False,
            may_speculate=self.speculative != "none",
            priority=_TIERS.get(self.service_tier or "", 0)
            if self.priority is None
            else self.priority,
        )

    def _options(self, max_new_tokens: int) -> SamplingOptions:
        options = self.model_dump(include=_OPTIONS, exclude_none=True)
        stop = options.get("stop", ())
        return SamplingOptions(
            **options | {
                "max_new_tokens": max_new_tokens,
                "repetition_penalty": self.repetition_penalty or self.repeat_penalty,
                "seed": None if self.seed is None else self.seed % SEEDS,
                "stop": (stop,) if isinstance(stop, str) else tuple(stop),
                "stop_token_ids": tuple(options.get("stop_token_ids", ())),
                "logit_bias": tuple((int(i), bias) for i, bias in (self.logit_bias or {}).items()),
            }
        )  # fmt: skip


def _first(*values: int | None) -> int | None:
    """Return the first value that is not None; None if there is none, or if that value is -1."""
    found = next((number for number in values if number is not None), None)
    return None if found == -1 else found


class TextPart(Body):
    """A text part of a message's content."""

    type: Literal["text"]
    text: str
    cache_control: _Json | None = None


class FunctionCall(Body):
    """The function of a tool call: its name and arguments."""

    name: str = Field(max_length=128)
    arguments: str


class ImageUrl(Body):
    """The address of an image."""

    url: str
    detail: str | None = None


class ImagePart(Body):
    """An image in a message's content: a data URL, or a local file where that is allowed."""

    type: Literal["image_url"]
    image_url: ImageUrl | str
    cache_control: _Json | None = None
    uuid: str | None = None

    @property
    def url(self) -> str:
        """The image's URL."""
        return self.image_url if isinstance(self.image_url, str) else self.image_url.url


class ToolCall(Body):
    """A tool call in an earlier answer."""

    id: str = Field(max_length=128)
    type: Literal["function"] = "function"
    function: FunctionCall
    index: int | None = None


class Message(Body):
    """One message of a conversation."""

    unsupported = _UNSUPPORTED_IN_MESSAGES

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[Annotated[TextPart | ImagePart, Field(discriminator="type")]] | None = None
    name: str | None = Field(None, max_length=128)
    tool_calls: list[ToolCall] | None = Field(None, max_length=128)
    tool_call_id: str | None = Field(None, max_length=128)
    reasoning_content: str | None = None
    refusal: str | None = None
    annotations: list[object] | None = None

    @field_validator("content", mode="before")
    @classmethod
    def _has_known_parts(cls, content: object) -> object:
        """Return the content; raises an error that names the type of its first unknown part."""
        for part in content if isinstance(content, list) else ():
            kind = part.get("type") if isinstance(part, dict) else None
            if isinstance(kind, str) and kind not in ("text", "image_url"):
                raise sentence(
                    f"the message holds a part of type {kind[:32]!r}, which no model here reads; "
                    "send parts of type text or image_url"
                )
        return content


class FunctionDefinition(Body):
    """A tool's name, description and parameters."""

    name: str = Field(pattern=r"^[A-Za-z0-9_.-]{1,128}$")
    description: str | None = None
    parameters: _Json | None = None
    strict: bool | None = None


class Tool(Body):
    """A tool that the model may call."""

    type: Literal["function"]
    function: FunctionDefinition


class ToolName(Body):
    """The name of a tool."""

    name: str = Field(max_length=128)


class ToolChoice(Body):
    """A tool that the answer must call."""

    type: Literal["function"]
    function: ToolName


class ChatRequest(Sampling):
    """The body of /v1/chat/completions."""

    messages: list[Message] = Field(min_length=1, max_length=4096)
    max_tokens: _MaxTokens | None = None
    max_completion_tokens: _MaxTokens | None = None
    n_predict: _MaxTokens | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)
    tools: list[Tool] | None = Field(None, max_length=128)
    tool_choice: Literal["none", "auto", "required"] | ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: _Json | None = Field(None, max_length=16)
    enable_thinking: bool | None = None
    thinking_token_budget: _Budget | None = None
    """The most reasoning tokens, by vLLM's name; the next two fields are llama.cpp's and Qwen's."""
    thinking_budget_tokens: _Budget | None = None
    thinking_budget: _Budget | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None
    modalities: list[Literal["text"]] | None = None
    prediction: _Json | None = None

    @property
    def max_answer_tokens(self) -> int | None:
        """The most tokens that the answer may have; None: only the context limits it."""
        return _first(self.max_completion_tokens, self.max_tokens, self.n_predict)

    @property
    def thinking_tokens(self) -> int | None:
        """The most tokens of reasoning; None: no limit."""
        budgets = self.thinking_token_budget, self.thinking_budget_tokens, self.thinking_budget
        return _first(*budgets)

    def request(self, ids: Sequence[int], room: int) -> Request:
        """Return the request for a prompt of token ids; its answer has at most `room` tokens."""
        num_top = (self.top_logprobs or 0) if self.logprobs else None
        return dataclasses.replace(super().request(ids, room), num_top_logprobs=num_top)


class CompletionRequest(Sampling):
    """The body of /v1/completions."""

    prompt: (
        str
        | Annotated[list[int], Field(min_length=1)]
        | Annotated[list[str], Field(min_length=1, max_length=1024)]
        | Annotated[
            list[Annotated[list[int], Field(min_length=1)]], Field(min_length=1, max_length=1024)
        ]
    )
    logprobs: int | None = Field(None, ge=0, le=20)
    echo: bool | None = None
    add_special_tokens: bool | None = None

    @property
    def num_answers(self) -> int:
        """The number of generation requests for this body: one per prompt and choice."""
        return len(self.prompts) * (self.n or 1)

    def request(self, ids: Sequence[int], room: int) -> Request:
        """Return the request for a prompt of token ids; its answer has at most `room` tokens."""
        return dataclasses.replace(
            super().request(ids, room),
            num_top_logprobs=self.logprobs,
            has_prompt_logprobs=bool(self.echo) and self.logprobs is not None,
        )

    @property
    def prompts(self) -> Sequence[str | list[int]]:
        """The prompts of the body: texts, or lists of token ids."""
        prompt: Any = self.prompt
        is_one = isinstance(prompt, str) or isinstance(prompt[0], int)
        return [prompt] if is_one else prompt
