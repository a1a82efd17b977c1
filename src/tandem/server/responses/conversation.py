"""A body of OpenAI's Responses API as the chat that it means."""

from collections.abc import Iterable, Sequence

from tandem.server.errors import ApiError
from tandem.server.responses.schemas import (
    AllowedTools,
    CallItem,
    CallOutputItem,
    CountRequest,
    FunctionTool,
    InputFile,
    InputImage,
    InputText,
    Item,
    MessageItem,
    NamedTool,
    Part,
    ReasoningItem,
    ResponsesRequest,
    TextFormat,
)
from tandem.server.schemas import (
    ChatRequest,
    FunctionCall,
    FunctionDefinition,
    JsonSchema,
    Message,
    ResponseFormat,
    Tool,
    ToolCall,
    ToolChoice,
    ToolName,
)


def new_messages(body: CountRequest) -> list[Message]:
    """Return the messages that a body adds to the conversation before it."""
    if isinstance(body.input, str):
        return [Message.model_construct(role="user", content=body.input)]
    messages = _Messages()
    for item in body.input or ():
        messages.add(item)
    return messages.found


def as_chat(body: CountRequest, earlier: Sequence[Message], new: Sequence[Message]) -> ChatRequest:
    """Return the chat that a body asks for, after the messages of earlier answers."""
    first = (
        [Message.model_construct(role="system", content=body.instructions)]
        if body.instructions
        else []
    )
    messages = [*first, *earlier, *new]
    if not messages:
        raise ApiError(400, "input holds no message; give some text", param="input")
    tools, choice = _tools(body)
    chat = ChatRequest.model_construct(
        model=body.model,
        messages=messages,
        tools=tools or None,
        tool_choice=choice,
        parallel_tool_calls=body.parallel_tool_calls,
        response_format=_format(body.text.format if body.text is not None else None),
        reasoning_effort=body.reasoning.effort if body.reasoning is not None else None,
    )
    if isinstance(body, ResponsesRequest):
        chat.max_tokens = body.max_output_tokens
        chat.temperature, chat.top_p = body.temperature, body.top_p
    return chat


class _Messages:
    """Items as messages: an answer's reasoning, text and calls are one message of a chat."""

    def __init__(self) -> None:
        self.found: list[Message] = []
        self._is_answering = False

    def add(self, item: Item) -> None:
        if isinstance(item, MessageItem) and item.role != "assistant":
            self._append(Message.model_construct(role=item.role, content=_text(item.content)))
        elif isinstance(item, CallOutputItem):
            content = _text(item.output)
            call_id = item.call_id[:128]
            self._append(
                Message.model_construct(role="tool", tool_call_id=call_id, content=content)
            )
        else:
            self._add_to_answer(item)

    def _append(self, message: Message) -> None:
        self.found.append(message)
        self._is_answering = False

    def _add_to_answer(self, item: MessageItem | CallItem | ReasoningItem) -> None:
        if not self._is_answering:
            self._append(Message.model_construct(role="assistant", content=""))
            self._is_answering = True
        answer = self.found[-1]
        if isinstance(item, CallItem):
            function = FunctionCall.model_construct(name=item.name, arguments=item.arguments)
            call = ToolCall.model_construct(id=item.call_id, function=function)
            answer.tool_calls = [*(answer.tool_calls or ()), call]
        elif isinstance(item, ReasoningItem):
            text = "\n".join(one.text for one in item.content or item.summary or ())
            answer.reasoning_content = _after(answer.reasoning_content, text) or None
        else:
            answer.content = _after(str(answer.content or ""), _text(item.content))


def _after(before: str | None, text: str) -> str:
    return "\n".join(filter(None, (before, text)))


def _text(content: str | Iterable[Part]) -> str:
    return content if isinstance(content, str) else "\n".join(map(_text_of_part, content))


def _text_of_part(part: Part) -> str:
    if isinstance(part, InputText):
        return part.text
    if isinstance(part, InputImage | InputFile):
        raise ApiError(
            400,
            f"this server's model reads text only; send no parts of type {part.type}",
            param="input",
        )
    return part.refusal


def _tools(body: CountRequest) -> tuple[list[Tool], str | ToolChoice | None]:
    """Return the tools that may be called, and which must."""
    choice, tools = body.tool_choice, body.tools or []
    if isinstance(choice, AllowedTools):
        names = {tool.name for tool in choice.tools}
        return [_tool(tool) for tool in tools if tool.name in names], choice.mode
    described = [_tool(tool) for tool in tools]
    if isinstance(choice, NamedTool):
        name = ToolName.model_construct(name=choice.name)
        return described, ToolChoice.model_construct(type="function", function=name)
    return described, choice


def _tool(tool: FunctionTool) -> Tool:
    function = FunctionDefinition(
        name=tool.name,
        description=tool.description,
        parameters=tool.parameters,
        strict=tool.strict,
    )
    return Tool.model_construct(type="function", function=function)


def _format(wanted: TextFormat | None) -> ResponseFormat | None:
    if wanted is None or wanted.type == "text":
        return None
    if wanted.type == "json_object":
        return ResponseFormat.model_construct(type="json_object")
    if wanted.json_schema is None:
        raise ApiError(400, "text.format json_schema needs a schema", param="text.format.schema")
    form = JsonSchema.model_construct(
        name=wanted.name or "answer", json_schema=wanted.json_schema, strict=wanted.strict
    )
    return ResponseFormat.model_construct(type="json_schema", json_schema=form)
