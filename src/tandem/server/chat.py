"""Conversations to prompts, and what a model wrote to reasoning, text and calls of tools.

The chat template writes the prompt. What comes back is taken apart by Transformers' response
parser: by the tokenizer's own `response_template` where it has one, else by the tags that most
models share (<think>, <tool_call>). A model whose template knows no tools reads of them in the
system message, in that same form.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tandem.foreign_types import Tokenizer
from tandem.server.errors import ApiError
from tandem.server.grammar import CallForm

THINK, END_THINK = "<think>", "</think>"
CALL, END_CALL = "<tool_call>", "</tool_call>"
_FIELDS: dict[str, object] = {
    "reasoning_content": {"open": THINK, "close": END_THINK, "content": "text"},
    "tool_calls": {
        "open": CALL,
        "close": END_CALL,
        "repeats": True,
        "content": "json",
        "transform": {"type": "function", "function": "{content}"},
    },
    "content": {"content": "text"},
}
_REASONING = ("reasoning_content", "reasoning", "thinking")
_TOOLS_TEXT = (
    "You can call these functions:\n<tools>\n{tools}\n</tools>\n"
    'To call one, answer with nothing but <tool_call>\n{{"name": NAME, "arguments": OBJECT}}\n'
    "</tool_call>"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatPrompt:
    """A conversation as the model reads it."""

    text: str
    ids: list[int]
    is_thinking: bool
    """Whether the template has opened the reasoning already."""


@dataclass(frozen=True, slots=True)
class Call:
    """A call of a tool."""

    name: str
    arguments: str
    """JSON text."""


@dataclass(frozen=True, slots=True)
class AnswerPart:
    """A part of an answer: exactly one field is there."""

    content: str = ""
    reasoning: str = ""
    call: Call | None = None


class ChatFormat:
    """How one model's conversations are written and read."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        """Look at what the tokenizer's chat template knows."""
        self._tokenizer = tokenizer
        template = tokenizer.chat_template
        text = template if isinstance(template, str) else json.dumps(template or "")
        self._has_template = bool(template)
        self._knows_tools = "tools" in text
        self.thinks = THINK in text
        """Whether an answer may begin with reasoning."""
        self._own_template = getattr(tokenizer, "response_template", None)
        self.marks = CallForm(
            opening=CALL,
            closing=END_CALL,
            think=THINK,
            end_think=END_THINK,
            special=frozenset(tokenizer.all_special_tokens),
        )

    def prompt(
        self,
        messages: Sequence[Mapping[str, object]],
        tools: Sequence[Mapping[str, object]],
        options: Mapping[str, object],
        *,
        must_not_think: bool = False,
    ) -> ChatPrompt:
        """Write a conversation; `options` are the chat template's own.

        `must_not_think` closes the reasoning, for an answer whose first word is ruled. Raises
        `ApiError` for a conversation that the template cannot write.
        """
        turns = [dict(message) for message in messages]
        if must_not_think:
            options = {**options, "enable_thinking": False}
        if not self._knows_tools:
            turns = _without_tools(turns, tools)
            tools = ()
        text = self._render(turns, tools, options)
        is_thinking = text.rstrip().endswith(THINK)
        if is_thinking and must_not_think:
            text += f"\n{END_THINK}\n\n"
            is_thinking = False
        # The template has written the special tokens.
        encoded = self._tokenizer(text, add_special_tokens=not self._has_template, verbose=False)
        return ChatPrompt(text=text, ids=list(encoded["input_ids"]), is_thinking=is_thinking)

    def _render(
        self,
        turns: list[dict[str, object]],
        tools: Sequence[Mapping[str, object]],
        options: Mapping[str, object],
    ) -> str:
        if not self._has_template:
            return "\n".join(str(turn.get("content", "")) for turn in turns)
        try:
            text: str = self._tokenizer.apply_chat_template(
                turns,
                tools=list(tools) or None,
                tokenize=False,
                **{"add_generation_prompt": True, **options},
            )
        except Exception as error:  # a template is a program that came with the model
            why = str(error).strip().partition("\n")[0][:200] or type(error).__name__
            what = "the model's chat template cannot write this"
            raise ApiError(
                400, f"{what}: {why}", reason=f"{what}: {type(error).__name__}"
            ) from error
        return text

    @property
    def has_our_marks(self) -> bool:
        """Whether calls come in the form of `marks`; else the tokenizer describes its own."""
        return self._own_template is None

    def reader(
        self, prompt: ChatPrompt, *, has_tools: bool, is_ruled: bool = False
    ) -> "AnswerReader | None":
        """Return what takes an answer apart; None where all of it is text.

        An answer that a grammar rules has our marks, whatever the tokenizer describes.
        """
        if self._own_template is not None and not is_ruled:
            return AnswerReader(self._own_template, prompt.text, "")
        names = ["reasoning_content"] if self.thinks else []
        names += ["tool_calls"] if has_tools else []
        if not names:
            return None
        fields = {name: _FIELDS[name] for name in (*names, "content")}
        # Nothing of the prompt is read here, so the anchor is one that never comes.
        template = {
            "defaults": {"role": "assistant"}, "fields": fields, "start_anchor": "\0",
        }  # fmt: skip
        return AnswerReader(template, "", THINK if prompt.is_thinking else "")

    def keeps_special(self, *, has_tools: bool) -> bool:
        """Tell whether a reader must see special tokens to find the parts."""
        has_reader = self.thinks or has_tools
        has_special = bool(self.marks.special & {THINK, CALL})
        return self._own_template is not None or (has_reader and has_special)


class AnswerReader:
    """Takes one answer apart as it comes. Spaces at a part's beginning are the format's."""

    def __init__(self, template: Mapping[str, object], prefix: str, begun: str) -> None:
        """Read by a response template; `begun` is what the prompt has opened already."""
        from transformers.utils.chat_parsing import ResponseParser

        self._parser = ResponseParser(dict(template), prefix=prefix)
        self._is_at_start = {"content": True, "reasoning": True}
        self._is_broken = False
        self._open_call = ""  # the text of a call that has not ended
        if begun:
            self._parser.feed(begun)

    def feed(self, text: str) -> list[AnswerPart]:
        """Take the next text; return the parts that are certain."""
        if self._is_broken:
            return [AnswerPart(content=text)] if text else []
        try:
            return list(self._parts(self._parser.feed(text)))
        except (ValueError, KeyError, TypeError):  # the model broke its own format: plain text
            self._is_broken = True
            return [AnswerPart(content=self._open_call + text)]

    def finish(self) -> list[AnswerPart]:
        """Return what was held back."""
        if self._is_broken:
            return []
        if self._open_call:
            return [AnswerPart(content=self._open_call)]
        try:
            return list(self._parts(self._parser.finalize()[1]))
        except (ValueError, KeyError, TypeError):
            return []

    def _parts(self, events: Sequence[Mapping[str, object]]) -> Iterator[AnswerPart]:
        for event in events:
            field = event.get("field")
            if field == "tool_calls":
                self._note_call(event)
            if event["type"] == "region_close" and field == "tool_calls":
                self._is_at_start["content"] = True
                call = _call(event.get("value"))
                if call is not None:
                    yield AnswerPart(call=call)
            elif event["type"] == "region_chunk" and not event.get("dirty"):
                text = str(event.get("text") or "")
                if field in _REASONING and (text := self._stripped("reasoning", text)):
                    yield AnswerPart(reasoning=text)
                elif field == "content" and (text := self._stripped("content", text)):
                    yield AnswerPart(content=text)

    def _note_call(self, event: Mapping[str, object]) -> None:
        if event["type"] == "region_open":
            self._open_call = CALL
        elif event["type"] == "region_chunk":
            self._open_call += str(event.get("text") or "")
        else:
            self._open_call = ""

    def _stripped(self, part: str, text: str) -> str:
        if self._is_at_start[part]:
            text = text.lstrip()
            self._is_at_start[part] = not text
        return text


def _call(value: object) -> Call | None:
    function = value.get("function") if isinstance(value, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        return None
    arguments = function.get("arguments", function.get("parameters", {}))
    if not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    return Call(function["name"], arguments)


def _without_tools(
    turns: list[dict[str, object]], tools: Sequence[Mapping[str, object]]
) -> list[dict[str, object]]:
    """Write tools, calls and results as text, for a template that knows none of them."""
    plain = [_plain_turn(turn) for turn in turns]
    if not tools:
        return plain
    listed = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
    text = _TOOLS_TEXT.format(tools=listed)
    if plain and plain[0]["role"] == "system":
        first = {**plain[0], "content": f"{plain[0]['content']}\n\n{text}"}
        return [first, *plain[1:]]
    return [{"role": "system", "content": text}, *plain]


def _plain_turn(turn: dict[str, Any]) -> dict[str, object]:
    if turn["role"] == "tool":
        content = f"<tool_response>\n{turn['content']}\n</tool_response>"
        return {"role": "user", "content": content}
    calls = turn.pop("tool_calls", None) or ()
    for call in calls:
        text = json.dumps(call["function"], ensure_ascii=False)
        turn["content"] = f"{turn['content']}\n{CALL}\n{text}\n{END_CALL}".lstrip()
    return turn
