"""Writes conversations as prompts, and makes readers for the answers.

The chat template writes the prompt and identifies the model's dialect; a tokenizer's description of
its own dialect (`response_template`) takes precedence. If the template does not support tools, the
system message describes them, in Hermes' form or in the form that the dialect specifies.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tandem.core.errors import ConfigError, first_line
from tandem.dialects.arguments import Schemas
from tandem.dialects.dialect import CALL, END_CALL, Dialect
from tandem.dialects.families import HERMES, dialect_of
from tandem.dialects.grammar import CallForm
from tandem.dialects.native_grammar import NativeForm
from tandem.dialects.reader import AnswerReader
from tandem.dialects.turns import (
    Turn,
    as_template_reads,
    as_text,
    options_of,
    without_tools,
)
from tandem.foreign_types import Tokenizer
from tandem.text.bounded_template import TemplateEndedError, rendered
from tandem.text.text_tokens import token_ids

if TYPE_CHECKING:
    from tandem.decode.images import ImagePrompt

# Our templates read nothing of the prompt, so the anchor is text that never occurs.
_TEMPLATE: Mapping[str, object] = {"defaults": {"role": "assistant"}, "start_anchor": "\0"}


# A tokenizer's own response template parses the calls; its result is used as it is.
_OWN = Dialect(name="own", marks=(), calls={}, values="parsed")
_NO_PLACE = "the model has no chat template, so images have no place in its prompts; leave them out"


class TemplateError(ConfigError):
    """A chat template cannot write a conversation; `reason` quotes no text of the conversation."""

    def __init__(self, message: str, reason: str) -> None:
        """Explain the error in `message`, which may quote the conversation, and in `reason`."""
        super().__init__(message)
        self.reason = reason


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatPrompt:
    """A conversation written as a prompt."""

    text: str
    ids: list[int]
    is_thinking: bool
    """Whether the template has already opened the reasoning."""
    images: "ImagePrompt | None" = None
    """The images, once the model's processor has prepared them; it then provides `ids` too."""


class ChatFormat:
    """Writes one model's conversations as prompts, and makes readers for its answers."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        """Derive the dialect, and whether tools and reasoning are supported, from the template."""
        self._tokenizer = tokenizer
        template = tokenizer.chat_template
        self._text = template if isinstance(template, str) else json.dumps(template or "")
        self._has_template = bool(template)
        self._knows_tools = "tools" in self._text
        self.dialect: Dialect = dialect_of(self._text)
        self.thinks = (self.dialect.thinks_by or self.dialect.think.strip()) in self._text
        """Whether an answer may begin with reasoning."""
        self._own_template = getattr(tokenizer, "response_template", None)
        self._special = frozenset(tokenizer.all_special_tokens)
        self.marks = CallForm(opening=CALL, closing=END_CALL, special=self._special)

    def prompt(
        self,
        messages: Sequence[Mapping[str, object]],
        tools: Sequence[Mapping[str, object]],
        options: Mapping[str, object],
        *,
        must_not_think: bool = False,
        most_tokens: int | None = None,
    ) -> ChatPrompt:
        """Write a conversation as a prompt; `options` are passed to the chat template.

        `must_not_think` closes the reasoning, for an answer whose first token is constrained.
        Raises `TemplateError` for a conversation that the template cannot write, and
        `TextTooLongError` for one that surely exceeds `most_tokens`.
        """
        turns = [dict(message) for message in messages]
        if must_not_think:
            options = {**options, "enable_thinking": False, "thinking": False}
        if not self._knows_tools:
            turns = without_tools(turns, tools, described=self.dialect.tools_text)
            tools = ()
        options = options_of(options, self._text)
        text = self._render(as_template_reads(turns, self._text), tools, options)
        is_thinking = self.thinks and text.rstrip().endswith(self.dialect.think.strip())
        if must_not_think:
            if is_thinking:
                text += f"\n{self.dialect.end_think}\n\n"
            text += self.dialect.answers_after
            is_thinking = False
        # The template's text already contains the special tokens.
        ids = token_ids(
            self._tokenizer, text, has_special=not self._has_template, most_tokens=most_tokens
        )
        return ChatPrompt(text=text, ids=ids, is_thinking=is_thinking)

    def _render(
        self,
        turns: list[Turn],
        tools: Sequence[Mapping[str, object]],
        options: Mapping[str, object],
    ) -> str:
        if not self._has_template:
            if any(isinstance(turn.get("content"), list) for turn in turns):
                raise TemplateError(_NO_PLACE, _NO_PLACE)
            return "\n".join(str(turn.get("content", "")) for turn in turns)
        try:
            return rendered(self._tokenizer, turns, tools=list(tools) or None, **options)
        except Exception as error:  # a template is a program that came with the model
            has_calls = any(turn.get("tool_calls") for turn in turns)
            # Some templates concatenate arguments with text.
            if has_calls and not isinstance(error, TemplateEndedError):
                try:
                    texts = [as_text(turn) for turn in turns]
                    return rendered(self._tokenizer, texts, tools=list(tools) or None, **options)
                except Exception:
                    pass
            why = first_line(error)[:200]
            what = "the model's chat template cannot write this"
            raise TemplateError(f"{what}: {why}", f"{what}: {type(error).__name__}") from error

    @property
    def native(self) -> NativeForm | None:
        """How the model writes calls; None if no grammar can constrain calls in its form."""
        dialect = self.dialect
        written = None if self._own_template is not None else dialect.written
        if written is None or any(text in self._text for text in written.unless):
            return None
        added = self._tokenizer.added_tokens_decoder.items()
        ids = {str(token): number for number, token in added if token.special}
        return NativeForm(
            written=written, think=dialect.think, end_think=dialect.end_think, ids=ids
        )

    def reader(
        self,
        prompt: ChatPrompt,
        tools: Sequence[Mapping[str, object]],
        *,
        is_ruled: bool = False,
    ) -> AnswerReader | None:
        """Return a reader that splits an answer into parts; None if the whole answer is text.

        `is_ruled` says that the answer follows a grammar with Hermes' marks, whatever the model's
        own dialect is.
        """
        if self._own_template is not None and not is_ruled:
            return AnswerReader(self._own_template, prompt.text, "", _OWN, _schemas(tools))
        dialect = HERMES if is_ruled else self.dialect
        fields = dialect.fields(has_tools=bool(tools), thinks=self.thinks and not is_ruled)
        if not fields:
            return None
        return AnswerReader(
            {**_TEMPLATE, "fields": {**fields, "content": {"content": "text"}}},
            "",
            dialect.think if prompt.is_thinking else "",
            dialect,
            _schemas(tools),
        )

    def keeps_special(self, *, has_tools: bool) -> bool:
        """Tell whether an answer's text must contain special tokens for the reader to split it."""
        dialect = self.dialect
        has_reader = self.thinks or has_tools or dialect.skipped is not None
        return self._own_template is not None or (
            has_reader and bool(self._special & dialect.special)
        )


def _schemas(tools: Sequence[Mapping[str, Any]]) -> Schemas:
    functions = [tool.get("function", {}) for tool in tools]
    return {str(one.get("name")): one.get("parameters") or {} for one in functions}
