"""A chat's messages, tools and options in the form that chat templates take."""

from collections.abc import Mapping

from tandem.apis.errors import ApiError
from tandem.apis.images import content_of
from tandem.apis.schemas import ChatRequest, Message, Tool
from tandem.dialects.arguments import json_value


def described(tools: list[Tool]) -> list[dict[str, object]]:
    """Return tools in the form that chat templates take."""
    return [tool.model_dump(exclude_none=True, exclude={"function": {"strict"}}) for tool in tools]


def tools_of(body: ChatRequest) -> list[Tool]:
    """Return the tools that the model may call; [] if `tool_choice` is "none"."""
    return [] if body.tool_choice == "none" else body.tools or []


def turn_of(message: Message) -> dict[str, object]:
    """Return a message in the form that chat templates take."""
    content: object = message.content
    if isinstance(content, list):
        content = content_of(content)
    role = "system" if message.role == "developer" else message.role
    turn: dict[str, object] = {"role": role, "content": content or ""}
    optional_fields = {"name", "tool_call_id", "reasoning_content"}
    turn |= message.model_dump(include=optional_fields, exclude_none=True)
    if message.tool_calls:
        turn["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {
                    "name": call.function.name,
                    # Templates serialize the arguments again in the model's own format.
                    "arguments": json_value(call.function.arguments),
                },
            }
            for call in message.tool_calls
        ]
    return turn


def template_options(body: ChatRequest) -> Mapping[str, object]:
    """Return a body's options for the chat template; raises `ApiError` for a reserved option."""
    options = dict(body.chat_template_kwargs or {})
    reserved = {"messages", "tools", "tokenize", "chat_template", "return_dict"}
    for name in options:
        if name in reserved or not name.isidentifier():
            raise ApiError(
                400,
                f"chat_template_kwargs must not set {name[:64]!r}",
                param="chat_template_kwargs",
            )
    if body.enable_thinking is not None:
        for name in ("enable_thinking", "thinking"):  # families name this option differently
            options.setdefault(name, body.enable_thinking)
    if body.continue_final_message:
        options |= {"continue_final_message": True, "add_generation_prompt": False}
    elif body.add_generation_prompt is not None:
        options["add_generation_prompt"] = body.add_generation_prompt
    if body.reasoning_effort is not None:
        options.setdefault("reasoning_effort", body.reasoning_effort)
        if body.reasoning_effort == "none":
            options |= {"enable_thinking": False, "thinking": False} | options
    return options
