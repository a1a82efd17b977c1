"""Converts the turns of a conversation to the form that one model's chat template expects."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

Turn = dict[str, Any]

_TOOLS_TEXT = (
    "You can call these functions:\n<tools>\n{tools}\n</tools>\n"
    'To call one, answer with nothing but <tool_call>\n{{"name": NAME, "arguments": OBJECT}}\n'
    "</tool_call>"
)


_KIMI_EFFORTS = {"minimal": "low", "low": "low", "medium": "high", "high": "high", "xhigh": "max"}


def as_template_reads(turns: Sequence[Turn], template: str) -> list[Turn]:
    """Return turns with the field names and call ids that a chat template expects."""
    found = [dict(turn) for turn in turns]
    if "length 9" in template:  # Mistral's
        found = [_with_ids(turn, {}) for turn in found]
    if "tool_call_argument_begin" in template:  # Kimi's
        names = _kimi_ids(found)
        found = [_with_ids(turn, names) for turn in found]
    if "message.thinking" in template and "reasoning_content" not in template:  # gpt-oss, LFM2
        found = [_with_thinking(turn) for turn in found]
    if "max 1 tool call per message" in template:  # gpt-oss
        found = _one_call_each(found)
    return found


def options_of(options: Mapping[str, object], template: str) -> Mapping[str, object]:
    """Return the options of a chat template, with names and values that the template knows."""
    if "thinking_mode" in template and "enable_thinking" in options:  # MiniMax M3's
        mode = "enabled" if options["enable_thinking"] else "disabled"
        return {"thinking_mode": mode, **options}
    if "thinking_effort" in template:  # Kimi K3's
        known_effort = _KIMI_EFFORTS.get(str(options.get("reasoning_effort")))
        return {"thinking_effort": known_effort, **options} if known_effort else options
    if "<tool_sep" not in template:  # Hunyuan's
        return options
    effort = options.get("reasoning_effort")
    if effort is None:
        effort = "high" if options.get("enable_thinking") else "none"
    known = {"none": "no_think", "minimal": "no_think", "low": "low"}
    return {**options, "reasoning_effort": known.get(str(effort), "high")}


def as_text(turn: Turn) -> Turn:
    """Return a turn whose call arguments are JSON text."""
    if not turn.get("tool_calls"):
        return turn
    calls = []
    for call in turn["tool_calls"]:
        arguments = call["function"]["arguments"]
        if not isinstance(arguments, str):
            arguments = json.dumps(arguments, ensure_ascii=False)
        calls.append({**call, "function": {**call["function"], "arguments": arguments}})
    return {**turn, "tool_calls": calls}


def without_tools(
    turns: Sequence[Turn],
    tools: Sequence[Mapping[str, object]],
    *,
    described: str | None = None,
) -> list[Turn]:
    """Return turns that describe tools as text, for a template that does not describe them.

    Calls and results also become text, in Hermes' form. If the template writes calls and results
    itself, they stay, and `described` must be the text that describes tools to its model.
    """
    plain = [_plain_turn(dict(turn)) if described is None else turn for turn in turns]
    if not tools:
        return plain
    listed = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
    text = (described or _TOOLS_TEXT).format(tools=listed)
    if plain and plain[0]["role"] == "system":
        first = {**plain[0], "content": _around("", plain[0]["content"], f"\n\n{text}")}
        return [first, *plain[1:]]
    return [{"role": "system", "content": text}, *plain]


def _plain_turn(turn: Turn) -> Turn:
    if turn["role"] == "tool":
        content = _around("<tool_response>\n", turn["content"], "\n</tool_response>")
        return {"role": "user", "content": content}
    for call in turn.pop("tool_calls", None) or ():
        text = json.dumps(call["function"], ensure_ascii=False)
        before = "\n" if turn["content"] else ""
        turn["content"] = _around("", turn["content"], f"{before}<tool_call>\n{text}\n</tool_call>")
    return turn


def _around(before: str, content: Any, after: str) -> Any:
    """Return a turn's content, which is text or a list of parts, with texts added around it."""
    if isinstance(content, str):
        return f"{before}{content}{after}"
    parts = ({"type": "text", "text": text} for text in (before, after) if text)
    return [*([next(parts)] if before else []), *content, *parts]


def _with_ids(turn: Turn, names: Mapping[str, str]) -> Turn:
    """Return a turn with its call ids replaced: by `names`, or else by nine hexadecimal digits."""

    def renamed(call_id: object) -> str:
        digest = hashlib.sha256(str(call_id).encode()).hexdigest()
        return names.get(str(call_id)) or digest[:9]

    changed = dict(turn)
    if turn.get("tool_calls"):
        changed["tool_calls"] = [{**one, "id": renamed(one["id"])} for one in turn["tool_calls"]]
    if "tool_call_id" in turn:
        changed["tool_call_id"] = renamed(turn["tool_call_id"])
    return changed


def _kimi_ids(turns: Sequence[Turn]) -> dict[str, str]:
    """Return Kimi's id for each call id: the tool's name and the call's number in the turns."""
    calls = [call for turn in turns for call in turn.get("tool_calls") or ()]
    return {
        str(call["id"]): f"functions.{call['function']['name']}:{number}"
        for number, call in enumerate(calls)
    }


def _with_thinking(turn: Turn) -> Turn:
    """Return a turn whose reasoning is also in the field `thinking`."""
    thoughts = turn.get("reasoning_content")
    return {**turn, "thinking": thoughts} if thoughts else turn


def _one_call_each(turns: Sequence[Turn]) -> list[Turn]:
    """Return turns with at most one call each; a call's result follows the call directly.

    A turn with calls, reasoning and text loses its text, because the template accepts either
    reasoning or text beside calls.
    """
    found: list[Turn] = []
    results = {turn.get("tool_call_id"): turn for turn in turns if turn["role"] == "tool"}
    call_ids: set[object] = set()
    for turn in turns:
        calls = turn.get("tool_calls") or ()
        if calls and turn.get("thinking"):
            turn = {**turn, "content": ""}
        if len(calls) < 2:
            if turn["role"] != "tool" or turn.get("tool_call_id") not in call_ids:
                found.append(turn)
            continue
        for i, call in enumerate(calls):
            alone = {**turn, "tool_calls": [call]}
            if i:
                alone = {"role": turn["role"], "content": "", "tool_calls": [call]}
            found.append(alone)
            if (result := results.get(call["id"])) is not None:
                call_ids.add(call["id"])
                found.append(result)
    return found
