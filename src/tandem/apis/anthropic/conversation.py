"""Converts a request body of Anthropic's Messages API to the server's own `ChatRequest`."""

import json
from collections.abc import Iterable, Iterator

from tandem.apis.anthropic.schemas import (
    CacheMarked,
    CountTokensRequest,
    DocumentBlock,
    ImageBlock,
    InputMessage,
    MessagesRequest,
    OutputFormat,
    TextBlock,
    ThinkingBlock,
    ToolDefinition,
    ToolResultBlock,
    ToolUseBlock,
)
from tandem.apis.anthropic.schemas import ToolChoice as AnthropicChoice
from tandem.apis.errors import ApiError
from tandem.apis.schemas import (
    ChatRequest,
    FunctionCall,
    FunctionDefinition,
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

# A coding agent sends this line for its vendor's accounting. It changes with each request, so no
# prompt behind it would ever be found in the KV cache.
_ACCOUNTS_LINE = "x-anthropic-billing-header:"


def as_chat(body: CountTokensRequest) -> ChatRequest:
    """Return the chat that a body asks for; raises `ApiError` for content that cannot be read."""
    choice = body.tool_choice
    chat = ChatRequest.model_construct(
        model=body.model,
        messages=[*_system(body.system), *(m for one in body.messages for m in _turn(one))],
        tools=[_tool(tool) for tool in body.tools or ()] or None,
        tool_choice=None if choice is None else _choice(choice),
        parallel_tool_calls=False if choice and choice.disable_parallel_tool_use else None,
        enable_thinking=None if body.thinking is None else body.thinking.type != "disabled",
        thinking_token_budget=None if body.thinking is None else body.thinking.budget_tokens,
        response_format=_format(body),
        continue_final_message=True if body.messages[-1].role == "assistant" else None,
    )
    if body.output_config is not None and (effort := body.output_config.effort):
        chat.reasoning_effort = "xhigh" if effort == "max" else effort
    if isinstance(body, MessagesRequest):
        chat.max_tokens = body.max_tokens
        chat.temperature, chat.top_p, chat.top_k = body.temperature, body.top_p, body.top_k
        chat.stop = body.stop_sequences or None
    return chat


def has_cache_marks(body: CountTokensRequest) -> bool:
    """Tell whether a body has a `cache_control` mark."""
    return body.cache_control is not None or any(
        marked.cache_control is not None for marked in _marked(body)
    )


def _marked(body: CountTokensRequest) -> Iterator[CacheMarked]:
    yield from body.tools or ()
    if isinstance(body.system, list):
        yield from body.system
    for message in body.messages:
        for block in message.content if isinstance(message.content, list) else ():
            if isinstance(block, CacheMarked):
                yield block


def _system(system: str | list[TextBlock] | None) -> list[Message]:
    texts = [block.text for block in system] if isinstance(system, list) else [system or ""]
    kept = [text for text in texts if text and not text.startswith(_ACCOUNTS_LINE)]
    return [Message.model_construct(role="system", content="\n\n".join(kept))] if kept else []


def _turn(message: InputMessage) -> Iterator[Message]:
    """Yield a message as chat messages: one for each tool result, then one for all other blocks."""
    content = message.content
    if isinstance(content, str):
        yield Message.model_construct(role=message.role, content=content)
        return
    for block in content:
        if isinstance(block, ToolResultBlock):
            text = _result(block)
            yield Message.model_construct(
                role="tool", tool_call_id=block.tool_use_id[:128], content=text
            )
    text = _content(content)
    calls = [_call(block) for block in content if isinstance(block, ToolUseBlock)]
    thoughts = [block.thinking for block in content if isinstance(block, ThinkingBlock)]
    if text or calls or thoughts or not any(isinstance(b, ToolResultBlock) for b in content):
        yield Message.model_construct(
            role=message.role,
            content=text,
            tool_calls=calls or None,
            reasoning_content="\n".join(thoughts) or None,
        )


def _result(block: ToolResultBlock) -> str | list[TextPart | ImagePart]:
    content = block.content
    return content if isinstance(content, str) else _content(content or ())


def _content(blocks: Iterable[object]) -> str | list[TextPart | ImagePart]:
    """Return the text of `blocks`; if there are images, a list of text and image parts."""
    parts: list[TextPart | ImagePart] = []
    for block in blocks:
        if isinstance(block, ImageBlock):
            parts.append(ImagePart.model_construct(type="image_url", image_url=_address(block)))
        elif text := _text(block):
            parts.append(TextPart.model_construct(type="text", text=text))
    if any(isinstance(part, ImagePart) for part in parts):
        return parts
    return "\n".join(part.text for part in parts if isinstance(part, TextPart))


def _address(block: ImageBlock) -> str:
    """Return an image's source as a URL; raises `ApiError` for an unknown form of source."""
    source = block.source
    kind, data, url = (source.get(name) for name in ("type", "data", "url"))
    if kind == "base64" and isinstance(data, str):
        return f"data:{source.get('media_type', 'image')};base64,{data}"
    if kind == "url" and isinstance(url, str):
        return url
    raise ApiError(400, "this source of an image is not supported; send its data as base64")


def _text(block: object) -> str:
    """Return the text of a text or document block; empty for all other blocks.

    Raises `ApiError` for a document that is not plain text.
    """
    if isinstance(block, TextBlock):
        return block.text
    if isinstance(block, DocumentBlock):
        data = block.source.get("data")
        if block.source.get("type") != "text" or not isinstance(data, str):
            raise ApiError(400, "this server's model reads documents of plain text only")
        return "\n".join(filter(None, (block.title, block.context, data)))
    return ""


def _call(block: ToolUseBlock) -> ToolCall:
    arguments = json.dumps(block.input, ensure_ascii=False)
    function = FunctionCall.model_construct(name=block.name, arguments=arguments)
    return ToolCall.model_construct(id=block.id, function=function)


def _tool(tool: ToolDefinition) -> Tool:
    function = FunctionDefinition(
        name=tool.name,
        description=tool.description,
        parameters=tool.input_schema,
        strict=tool.strict,
    )
    return Tool.model_construct(type="function", function=function)


def _choice(choice: AnthropicChoice) -> str | ToolChoice:
    if choice.type != "tool":
        return "required" if choice.type == "any" else choice.type
    if choice.name is None:
        raise ApiError(400, "tool_choice of type tool needs a name", param="tool_choice.name")
    return ToolChoice.model_construct(
        type="function", function=ToolName.model_construct(name=choice.name)
    )


def _format(body: CountTokensRequest) -> ResponseFormat | None:
    output_format: OutputFormat | None = body.output_format
    if body.output_config is not None and body.output_config.format is not None:
        output_format = body.output_config.format
    if output_format is None:
        return None
    form = JsonSchema.model_construct(json_schema=output_format.json_schema, strict=True)
    return ResponseFormat.model_construct(type="json_schema", json_schema=form)
