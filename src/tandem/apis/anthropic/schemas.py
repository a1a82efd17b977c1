"""The bodies of Anthropic's Messages API, as far as a model that writes text can follow them."""

from typing import Annotated, Literal

from pydantic import Field, ValidationInfo, field_validator

from tandem.apis.reading import Body, Unsupported, tools_of_kind
from tandem.apis.schemas import RequestBody

_Json = dict[str, object]
_Id = Annotated[str, Field(max_length=256)]
_Stop = Annotated[str, Field(min_length=1, max_length=256)]

_UNSUPPORTED = {
    "container": Unsupported((), "run code yourself, with a tool"),
    "mcp_servers": Unsupported(([],), "describe their tools in tools"),
}


class CacheMarked(Body):
    """A block or tool that `cache_control` may mark: the prompt up to here should be kept."""

    cache_control: _Json | None = None


class TextBlock(CacheMarked):
    """A block of text."""

    type: Literal["text"]
    text: str
    citations: object = None


class ImageBlock(CacheMarked):
    """An image block."""

    type: Literal["image"]
    source: _Json


class DocumentBlock(CacheMarked):
    """A document block; only plain text is read."""

    type: Literal["document"]
    source: _Json
    title: str | None = None
    context: str | None = None
    citations: object = None


class ThinkingBlock(Body):
    """The model's reasoning in an earlier answer."""

    type: Literal["thinking"]
    thinking: str
    signature: str | None = None


class RedactedThinkingBlock(Body):
    """Another model's encrypted reasoning, which cannot be read here."""

    type: Literal["redacted_thinking"]
    data: str | None = None


class ToolUseBlock(CacheMarked):
    """A tool call in an earlier answer."""

    type: Literal["tool_use"]
    id: _Id
    name: _Id
    input: _Json
    caller: _Json | None = None


class ToolResultBlock(CacheMarked):
    """The result of a tool call."""

    type: Literal["tool_result"]
    tool_use_id: _Id
    content: str | list["ResultBlock"] | None = None
    is_error: bool | None = None


ResultBlock = Annotated[TextBlock | ImageBlock | DocumentBlock, Field(discriminator="type")]
Block = Annotated[
    TextBlock
    | ImageBlock
    | DocumentBlock
    | ThinkingBlock
    | RedactedThinkingBlock
    | ToolUseBlock
    | ToolResultBlock,
    Field(discriminator="type"),
]
ToolResultBlock.model_rebuild()


class InputMessage(Body):
    """One message of a conversation."""

    role: Literal["user", "assistant", "system"]
    content: str | list[Block]


class ToolDefinition(CacheMarked):
    """A tool that the model may call."""

    type: Literal["custom"] | None = None
    name: str = Field(pattern=r"^[A-Za-z0-9_.-]{1,128}$")
    description: str | None = None
    input_schema: _Json
    strict: bool | None = None
    input_examples: object = None
    allowed_callers: object = None
    defer_loading: bool | None = None
    eager_input_streaming: bool | None = None


class ToolChoice(Body):
    """Whether the model must, may or must not call a tool, and which one."""

    type: Literal["auto", "any", "tool", "none"]
    name: _Id | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(Body):
    """Whether the model may reason, and with how many tokens."""

    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    budget_tokens: int | None = Field(None, ge=0)
    display: str | None = None


class OutputFormat(Body):
    """The JSON schema that the answer must follow."""

    type: Literal["json_schema"]
    json_schema: _Json = Field(alias="schema")


class OutputConfig(Body):
    """How much the model reasons, and the form of its answer."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormat | None = None
    task_budget: object = None


class CountTokensRequest(RequestBody):
    """The body of /v1/messages/count_tokens."""

    unsupported = _UNSUPPORTED

    messages: list[InputMessage] = Field(min_length=1, max_length=100_000)
    system: str | list[TextBlock] | None = None
    tools: list[ToolDefinition] | None = Field(None, max_length=1024)
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None
    cache_control: _Json | None = None
    context_management: _Json | None = None
    speed: str | None = None

    @field_validator("tools", mode="before")
    @classmethod
    def _without_tools_of_elsewhere(cls, tools: object, info: ValidationInfo) -> object:
        """Drop tools that only Anthropic's models know; on a strict server they are an error."""
        return tools_of_kind(("custom",), tools, info)


class MessagesRequest(CountTokensRequest):
    """The body of /v1/messages."""

    max_tokens: int = Field(ge=1, le=2**31)
    stop_sequences: list[_Stop] | None = Field(None, max_length=64)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, ge=0, le=1)
    top_k: int | None = Field(None, ge=0, le=2**31)
    metadata: _Json | None = None
    service_tier: str | None = None
    inference_geo: str | None = None
