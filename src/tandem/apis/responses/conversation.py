"""Converts a request body of OpenAI's Responses API to the server's own `ChatRequest`."""

from collections.abc import Iterable, Sequence

from tandem.apis.errors import ApiError
from tandem.apis.responses.schemas import (
    AllowedTools,
    CallItem,
    CallOutputItem,
    CountRequest,
    CustomCallItem,
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
from tandem.apis.responses.tools import as_arguments, flat_name, known_tools
from tandem.apis.schemas import (
    ChatRequest,
    FunctionCall,
    ImagePart,
    JsonSchema,
    Message,
    ResponseFormat,
    TextPart,
    Tool,
    ToolCall,
    ToolChoice,
    ToolName,
)


def new_messages(body: CountRequest) -> list[Message]:
    """Return the messages that a body adds to the earlier conversation."""
    if isinstance(body.input, str):
        return [Message.model_construct(role="user", content=body.input)]
    messages = _Messages()
    for item in body.input or ():
        messages.add(item)
    return messages.found


def as_chat(body: CountRequest, earlier: Sequence[Message], new: Sequence[Message]) -> ChatRequest:
    """Return the chat that a body asks for: its instructions, then earlier and new messages.

    Raises `ApiError` if there are no messages.
    """
    first = (
        [Message.model_construct(role="system", content=body.instructions)]
        if body.instructions
        else []
    )
    messages = [*first, *earlier, *new]
    if not messages:
        raise ApiError(400, "input has no message; give some text", param="input")
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
    """Converts items of the Responses API to chat messages, which `found` collects.

    Consecutive items of an answer (reasoning, text, tool calls) form one message.
    """

    def __init__(self) -> None:
        self.found: list[Message] = []
        self._is_answering = False

    def add(self, item: Item) -> None:
        if isinstance(item, MessageItem) and item.role != "assistant":
            self._append(Message.model_construct(role=item.role, content=_content(item.content)))
        elif isinstance(item, CallOutputItem):
            content = _content(item.output)
            call_id = item.call_id[:128]
            self._append(
                Message.model_construct(role="tool", tool_call_id=call_id, content=content)
            )
        else:
            self._add_to_answer(item)

    def _append(self, message: Message) -> None:
        self.found.append(message)
        self._is_answering = False

    def _add_to_answer(self, item: MessageItem | CallItem | CustomCallItem | ReasoningItem) -> None:
        if not self._is_answering:
            self._append(Message.model_construct(role="assistant", content=""))
            self._is_answering = True
        answer = self.found[-1]
        if isinstance(item, CallItem | CustomCallItem):
            name = flat_name(item.name, item.namespace)
            arguments = item.arguments if isinstance(item, CallItem) else as_arguments(item.input)
            function = FunctionCall.model_construct(name=name, arguments=arguments)
            call = ToolCall.model_construct(id=item.call_id, function=function)
            answer.tool_calls = [*(answer.tool_calls or ()), call]
        elif isinstance(item, ReasoningItem):
            text = "\n".join(one.text for one in item.content or item.summary or ())
            answer.reasoning_content = _after(answer.reasoning_content, text) or None
        else:
            answer.content = _after(str(answer.content or ""), _text(item.content))


def _after(before: str | None, text: str) -> str:
    return "\n".join(filter(None, (before, text)))


def _content(content: str | Sequence[Part]) -> str | list[TextPart | ImagePart]:
    """Return the text of `content`; if there are images, a list of text and image parts."""
    if isinstance(content, str) or not any(isinstance(part, InputImage) for part in content):
        return _text(content)
    return [
        ImagePart.model_construct(type="image_url", image_url=_address(part))
        if isinstance(part, InputImage)
        else TextPart.model_construct(type="text", text=_text_of_part(part))
        for part in content
    ]


def _address(part: InputImage) -> str:
    if part.image_url is None:
        raise ApiError(400, "input_image needs image_url: no files are kept here", param="input")
    return part.image_url


def _text(content: str | Iterable[Part]) -> str:
    return content if isinstance(content, str) else "\n".join(map(_text_of_part, content))


def _text_of_part(part: Part) -> str:
    if isinstance(part, InputText):
        return part.text
    if isinstance(part, InputImage | InputFile):
        raise ApiError(
            400, f"a part of type {part.type} is not read here; send its text", param="input"
        )
    return part.refusal


def _tools(body: CountRequest) -> tuple[list[Tool], str | ToolChoice | None]:
    """Return the tools that the model may call, and the chat's `tool_choice`."""
    choice, known = body.tool_choice, known_tools(body.tools)
    described = {name: tool.as_function(name) for name, tool in known.items()}
    if isinstance(choice, AllowedTools):
        names = {flat_name(tool.name, tool.namespace) for tool in choice.tools}
        return [tool for name, tool in described.items() if name in names], choice.mode
    if isinstance(choice, NamedTool):
        function = ToolName.model_construct(name=flat_name(choice.name, choice.namespace))
        chosen = ToolChoice.model_construct(type="function", function=function)
        return [*described.values()], chosen
    return [*described.values()], choice


def _format(text_format: TextFormat | None) -> ResponseFormat | None:
    if text_format is None or text_format.type == "text":
        return None
    if text_format.type == "json_object":
        return ResponseFormat.model_construct(type="json_object")
    if text_format.json_schema is None:
        raise ApiError(400, "text.format json_schema needs a schema", param="text.format.schema")
    form = JsonSchema.model_construct(
        name=text_format.name or "answer",
        json_schema=text_format.json_schema,
        strict=text_format.strict,
    )
    return ResponseFormat.model_construct(type="json_schema", json_schema=form)
