"""The bodies of OpenAI's Responses API, as far as a model that writes text can follow them."""

from typing import Annotated, Literal

from pydantic import Field, ValidationInfo, field_validator

from tandem.apis.reading import Body, Unsupported, tools_of_kind
from tandem.apis.schemas import RequestBody

_Json = dict[str, object]
_Id = Annotated[str, Field(max_length=256)]

_UNSUPPORTED = {
    "background": Unsupported((False,), "wait for the answer, or stream it"),
    "conversation": Unsupported((), "name the previous answer in previous_response_id"),
    "prompt": Unsupported((), "send the prompt in input and instructions"),
    "top_logprobs": Unsupported((0,), "ask /v1/chat/completions for log-probabilities"),
    "max_tool_calls": Unsupported((), "count the calls in the program that answers them"),
}
_UNSUPPORTED_IN_TEXT = {
    "verbosity": Unsupported(("medium",), "say in the prompt how long the answer should be")
}


class InputText(Body):
    """Text in a message of the user or the model."""

    type: Literal["input_text", "output_text", "text"]
    text: str
    annotations: object = None
    logprobs: object = None
    prompt_cache_breakpoint: object = None


class Refusal(Body):
    """A refusal in an earlier answer."""

    type: Literal["refusal"]
    refusal: str


class InputImage(Body):
    """An image in a message."""

    type: Literal["input_image"]
    image_url: str | None = None
    file_id: str | None = None
    detail: str | None = None


class InputFile(Body):
    """A file in a message."""

    type: Literal["input_file"]
    file_id: str | None = None
    file_data: str | None = None
    file_url: str | None = None
    filename: str | None = None


Part = Annotated[InputText | Refusal | InputImage | InputFile, Field(discriminator="type")]


class _Item(Body):
    """The fields that every item may have."""

    id: _Id | None = None
    status: str | None = None


class _ToolItem(_Item):
    """The fields that items of tool calls and of their results share."""

    call_id: _Id
    namespace: str | None = None
    caller: object = None


class MessageItem(_Item):
    """A message of a conversation."""

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: str | list[Part]
    phase: str | None = None


class CallItem(_ToolItem):
    """A tool call in an earlier answer."""

    type: Literal["function_call"]
    name: _Id
    arguments: str


class CustomCallItem(_ToolItem):
    """A call of a custom tool in an earlier answer."""

    type: Literal["custom_tool_call"]
    name: _Id
    input: str


class CallOutputItem(_ToolItem):
    """The result of a tool call."""

    type: Literal["function_call_output", "custom_tool_call_output"]
    output: str | list[Part]
    name: str | None = None


class ReasoningText(Body):
    """Text of earlier reasoning, or of its summary."""

    type: Literal["reasoning_text", "summary_text"]
    text: str


class ReasoningItem(_Item):
    """The model's reasoning in an earlier answer."""

    type: Literal["reasoning"]
    summary: list[ReasoningText] | None = None
    content: list[ReasoningText] | None = None
    encrypted_content: str | None = None


Item = MessageItem | CallItem | CustomCallItem | CallOutputItem | ReasoningItem


class _NamedTool(Body):
    """The name and description of a tool."""

    name: str = Field(pattern=r"^[A-Za-z0-9_.-]{1,128}$")
    description: str | None = None
    allowed_callers: object = None
    defer_loading: bool | None = None


class FunctionTool(_NamedTool):
    """A tool that the model may call."""

    type: Literal["function"]
    parameters: _Json | None = None
    strict: bool | None = None
    output_schema: _Json | None = None


class CustomTool(_NamedTool):
    """A tool whose input is plain text."""

    type: Literal["custom"]
    format: _Json | None = None


class NamespaceTool(Body):
    """Several tools under one name."""

    type: Literal["namespace"]
    name: str = Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$")
    description: str | None = None
    tools: list[Annotated[FunctionTool | CustomTool, Field(discriminator="type")]]


Tool = FunctionTool | CustomTool | NamespaceTool


class NamedTool(Body):
    """The name of a tool: the tool that must be called, or a member of `AllowedTools`."""

    type: Literal["function", "custom"]
    name: _Id
    namespace: str | None = None


class AllowedTools(Body):
    """The subset of `tools` that the model may call in this answer."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: list[NamedTool] = Field(max_length=1024)


class TextFormat(Body):
    """The format of the answer: text, JSON or a JSON schema."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = Field(None, max_length=128)
    description: str | None = None
    json_schema: _Json | None = Field(None, alias="schema")
    strict: bool | None = None


class TextConfig(Body):
    """How the answer's text is formatted."""

    unsupported = _UNSUPPORTED_IN_TEXT

    format: TextFormat | None = None


class Reasoning(Body):
    """How much the model reasons."""

    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None
    summary: str | None = None
    generate_summary: str | None = None
    context: str | None = None
    mode: str | None = None


class CountRequest(RequestBody):
    """The body of /v1/responses/input_tokens."""

    unsupported = _UNSUPPORTED

    input: str | list[Item] | None = None
    instructions: str | None = None
    previous_response_id: _Id | None = None
    tools: list[Annotated[Tool, Field(discriminator="type")]] | None = Field(None, max_length=1024)
    tool_choice: Literal["none", "auto", "required"] | NamedTool | AllowedTools | None = None
    parallel_tool_calls: bool | None = None
    text: TextConfig | None = None
    reasoning: Reasoning | None = None
    truncation: Literal["auto", "disabled"] | None = None

    @property
    def earlier_id(self) -> str | None:
        """The id of the response that this request continues; None for a new conversation."""
        return self.previous_response_id

    @field_validator("tools", mode="before")
    @classmethod
    def _without_tools_of_elsewhere(cls, tools: object, info: ValidationInfo) -> object:
        """Drop tools that run on OpenAI's servers; on a strict server they are an error."""
        return tools_of_kind(("function", "custom", "namespace"), tools, info)


class ResponsesRequest(CountRequest):
    """The body of /v1/responses."""

    input: str | list[Item] = Field()
    max_output_tokens: int | None = Field(None, ge=1, le=2**31)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, ge=0, le=1)
    store: bool | None = None
    include: list[str] | None = Field(None, max_length=64)
    metadata: dict[str, str] | None = Field(None, max_length=16)
    stream_options: _Json | None = None
    user: str | None = Field(None, max_length=512)
    safety_identifier: str | None = Field(None, max_length=512)
    service_tier: str | None = Field(None, max_length=64)
    prompt_cache_key: str | None = Field(None, max_length=512)
    prompt_cache_retention: str | None = Field(None, max_length=64)
    prompt_cache_options: _Json | None = None
    context_management: object = None
