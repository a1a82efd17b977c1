"""Converts a body of Ollama's API to the server's own `ChatRequest` or `CompletionRequest`."""

import json
from collections.abc import Iterator

from tandem.apis.errors import ApiError
from tandem.apis.ollama.schemas import (
    OllamaChatRequest,
    OllamaGenerateRequest,
    OllamaMessage,
    OllamaOptions,
    OllamaRequest,
    OllamaTool,
    OllamaToolCall,
)
from tandem.apis.schemas import (
    ChatRequest,
    CompletionRequest,
    FunctionCall,
    ImagePart,
    JsonSchema,
    Message,
    ResponseFormat,
    Sampling,
    TextPart,
    Tool,
    ToolCall,
)


def chat_of(body: OllamaChatRequest) -> ChatRequest:
    """Return the chat that a body of /api/chat asks for."""
    messages = body.messages or []
    is_begun = bool(messages) and messages[-1].role == "assistant" and not messages[-1].tool_calls
    chat = ChatRequest.model_construct(
        messages=list(_turns(messages)),
        tools=[_tool(tool) for tool in body.tools or ()] or None,
        continue_final_message=True if is_begun else None,
    )
    return _with_shared_fields(chat, body)


def generated_chat(body: OllamaGenerateRequest) -> ChatRequest:
    """Return the chat that a body of /api/generate without `raw` asks for."""
    system = [OllamaMessage.model_construct(role="system", content=body.system)]
    user = OllamaMessage.model_construct(role="user", content=body.prompt, images=body.images)
    messages = [*(system if body.system else []), user]
    return _with_shared_fields(ChatRequest.model_construct(messages=list(_turns(messages))), body)


def raw_completion(body: OllamaGenerateRequest) -> CompletionRequest:
    """Return the completion that a body of /api/generate with `raw` asks for."""
    if body.system or body.images or body.think:
        raise ApiError(
            400, "raw takes the prompt as it is, without system, images and think", param="raw"
        )
    num_top = (body.top_logprobs or 0) if body.logprobs else None
    completion = CompletionRequest.model_construct(prompt=body.prompt or "", logprobs=num_top)
    _take_options(completion, body.options or OllamaOptions.model_construct())
    completion.response_format = _format(body)
    return completion


def _with_shared_fields(chat: ChatRequest, body: OllamaRequest) -> ChatRequest:
    """Copy the options that all of Ollama's bodies share from `body` to `chat`; return `chat`."""
    _take_options(chat, body.options or OllamaOptions.model_construct())
    chat.response_format = _format(body)
    chat.logprobs, chat.top_logprobs = body.logprobs, body.top_logprobs
    if body.think is not None:
        chat.enable_thinking = body.think is not False
    if isinstance(body.think, str):
        chat.reasoning_effort = "xhigh" if body.think == "max" else body.think
    return chat


def _take_options(sampling: Sampling, options: OllamaOptions) -> None:
    sampling.max_tokens = options.num_predict if (options.num_predict or 0) > 0 else None
    sampling.seed = options.seed if (options.seed or 0) >= 0 else None
    sampling.temperature, sampling.stop = options.temperature, options.stop or None
    sampling.top_k, sampling.top_p, sampling.min_p = options.top_k, options.top_p, options.min_p
    sampling.repeat_penalty = options.repeat_penalty
    sampling.presence_penalty = options.presence_penalty
    sampling.frequency_penalty = options.frequency_penalty


def _format(body: OllamaRequest) -> ResponseFormat | None:
    if not body.format:
        return None
    if isinstance(body.format, str):
        return ResponseFormat.model_construct(type="json_object")
    schema = JsonSchema.model_construct(json_schema=body.format)
    return ResponseFormat.model_construct(type="json_schema", json_schema=schema)


def _turns(messages: list[OllamaMessage]) -> Iterator[Message]:
    """Yield the messages as chat messages.

    A tool call without an id gets one; a tool result without an id gets the id of its call.
    """
    waiting: list[ToolCall] = []  # calls without a result
    num_calls = 0
    for message in messages:
        calls = []
        for call in message.tool_calls or ():
            num_calls += 1
            calls.append(_call(call, num_calls))
        waiting += calls
        name = message.tool_name or message.name
        yield Message.model_construct(
            role=message.role,
            content=_content(message),
            tool_calls=calls or None,
            reasoning_content=message.thinking or None,
            name=name,
            tool_call_id=(message.tool_call_id or _taken(waiting, name))
            if message.role == "tool"
            else None,
        )


def _taken(waiting: list[ToolCall], name: str | None) -> str | None:
    """Remove the call that a tool result answers from `waiting`; return its id, or None.

    The result answers the first call of the tool `name`; if `name` is None, the first call. The id
    is None if there is no such call.
    """
    for call in waiting:
        if name in (None, call.function.name):
            waiting.remove(call)
            return call.id
    return None


def _content(message: OllamaMessage) -> str | list[TextPart | ImagePart]:
    text = message.content or ""
    if not message.images:
        return text
    images = [
        ImagePart.model_construct(type="image_url", image_url=f"data:image;base64,{data}")
        for data in message.images
    ]
    return [*images, TextPart.model_construct(type="text", text=text)]


def _call(call: OllamaToolCall, number: int) -> ToolCall:
    arguments = json.dumps(call.function.arguments, ensure_ascii=False)
    function = FunctionCall.model_construct(name=call.function.name, arguments=arguments)
    return ToolCall.model_construct(id=call.id or f"call_{number}", function=function)


def _tool(tool: OllamaTool) -> Tool:
    return Tool.model_construct(type="function", function=tool.function)
