"""Turns a checked body into a generation request for the engine process."""

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from tandem.apis.errors import ApiError
from tandem.apis.images import TEXT_ONLY, ImageReader
from tandem.apis.ruling import GrammarWriter, chat_grammar, described_tools, text_grammar
from tandem.apis.schemas import SEEDS, ChatRequest, CompletionRequest, Sampling, Tool
from tandem.apis.turns import described, template_options, tools_of, turn_of
from tandem.dialects.format import ChatFormat, ChatPrompt
from tandem.dialects.reader import AnswerReader
from tandem.dialects.tool_grammar import free_calls
from tandem.engine.messages import ModelInfo
from tandem.foreign_types import Tokenizer
from tandem.generate.conversation import trim_conversation, without_images
from tandem.generate.request import Request
from tandem.generate.thinking import ThinkingLimit
from tandem.text.text_tokens import TextTooLongError, token_ids

# Tokens that a trimmed conversation leaves for an answer without a stated length.
_TRIMMED_ROOM = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """A request to the engine process, and the data to turn its token outputs into an answer."""

    request: Request
    prompt_text: str
    grammar: GrammarWriter | None = None
    """Writes the grammar that the answer must follow; None: no grammar. A body's requests have the
    same writer."""
    reader: AnswerReader | None = None
    has_one_call: bool = False
    """Whether tool calls after the first are dropped from the answer."""
    echo: str = ""
    """Text before the first generated token: the prompt if the body has `echo`, else empty."""
    num_dropped_turns: int = 0
    """How many of the conversation's oldest turns were dropped to make it fit the context."""

    @property
    def prompt_tokens(self) -> int:
        """The number of tokens in the prompt."""
        return len(self.request.prompt)


class GenerationRequests:
    """Turns checked bodies into generation requests for one model."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        context: int | None,
        trims: bool = False,
        images: ImageReader | None = None,
    ) -> None:
        """Limit a prompt with its answer to `context` tokens and to the model's own limit.

        If `context` is None, only the model's limit applies. `trims` drops the oldest turns of a
        conversation that does not fit. `images` reads the images of requests; None for a model that
        takes no images.
        """
        self._tokenizer = tokenizer
        self._trims = trims
        self._images = images
        self._format = ChatFormat(tokenizer)
        self._context = context

    def capabilities(self, info: ModelInfo | None) -> dict[str, dict[str, bool]]:
        """Return the `capabilities` field of Anthropic's model objects for the model."""
        found = {
            "tools": True,
            "structured_outputs": True,
            "thinking": self._format.thinks,
            "image_input": self._why_no_images(info) is None,
            "pdf_input": False,
        }
        return {name: {"supported": is_there} for name, is_there in found.items()}

    def chat(
        self, body: ChatRequest, info: ModelInfo, *, trims: bool = False
    ) -> list[GenerationRequest]:
        """Return the generation requests of a chat, one per choice.

        `trims`, here or in `__init__`, drops the oldest turns of a chat that does not fit. Raises
        `ApiError` or `ConfigError` for an invalid chat.
        """
        tools = tools_of(body)
        ruled = chat_grammar(body, tools, self._format.marks)
        is_ruled = ruled is not None
        shown_tools = described(tools)
        written = self._written(body, tools, info, is_ruled=is_ruled)
        limit = self.limit(info) if self._trims or trims else None
        prompt, num_dropped = _fitting([*map(turn_of, body.messages)], written, limit, body)
        if body.top_logprobs and not body.logprobs:
            raise ApiError(400, "top_logprobs needs logprobs: true", param="top_logprobs")
        request = self._request(body, prompt.ids, info)
        keeps_special = self._format.keeps_special(has_tools=bool(tools))
        request = replace(
            request,
            images=prompt.images,
            thinking=None if is_ruled else self._thinking(body, prompt),
            keeps_special=request.keeps_special or keeps_special,
        )
        grammar = ruled or self._free(body, tools, prompt)
        return [
            GenerationRequest(
                request=one,
                prompt_text=prompt.text,
                grammar=grammar,
                reader=self._format.reader(prompt, shown_tools, is_ruled=is_ruled),
                has_one_call=body.parallel_tool_calls is False,
                num_dropped_turns=num_dropped,
            )
            for one in _choices(request, body.n)
        ]

    def chat_ids(self, body: ChatRequest, info: ModelInfo) -> list[int]:
        """Return the token ids of a chat's prompt.

        Raises `TextTooLongError` before tokenizing a prompt that certainly exceeds the context.
        """
        tools = tools_of(body)
        is_ruled = chat_grammar(body, tools, self._format.marks) is not None
        written = self._written(body, tools, info, is_ruled=is_ruled)
        return written([*map(turn_of, body.messages)]).ids

    def text_of(self, ids: list[int], info: ModelInfo) -> str:
        """Return the text of token ids, special tokens included; `ApiError` for unknown ids."""
        _require_known(ids, info, "tokens")
        return str(self._tokenizer.decode(ids))

    def _written(
        self, body: ChatRequest, tools: list[Tool], info: ModelInfo, *, is_ruled: bool
    ) -> Callable[[list[dict[str, object]]], ChatPrompt]:
        """Return a function that turns messages into a prompt by the chat template."""
        shown_tools, options = described(tools), template_options(body)

        def written(turns: list[dict[str, object]]) -> ChatPrompt:
            shown, sources = without_images(turns)
            if sources and (why := self._why_no_images(info)) is not None:
                raise ApiError(400, why, param="messages")
            prompt = self._format.prompt(
                shown, shown_tools, options, must_not_think=is_ruled,
                most_tokens=self.limit(info),
            )  # fmt: skip
            if not sources or self._images is None:
                return prompt
            images = self._images.write(prompt.text, sources)
            return replace(prompt, ids=list(images.ids), images=images)

        return written

    def _why_no_images(self, info: ModelInfo | None) -> str | None:
        """Return a sentence that says why images are refused; None: they are accepted."""
        if self._images is None:
            return TEXT_ONLY
        return self._images.why_none or (None if info is None else info.why_no_images)

    def completions(self, body: CompletionRequest, info: ModelInfo) -> list[GenerationRequest]:
        """Return the generation requests of a completion request, one per prompt and choice."""
        grammar = text_grammar(body)
        generation_requests = []
        for prompt in body.prompts:
            ids = self.text_ids(prompt, info, has_special=body.add_special_tokens is not False)
            request = self._request(body, ids, info)
            text = str(prompt)
            echo = ""
            if body.echo:
                echo = text if isinstance(prompt, str) else str(self._tokenizer.decode(prompt))
            generation_requests += [
                GenerationRequest(request=one, prompt_text=text, grammar=grammar, echo=echo)
                for one in _choices(request, body.n)
            ]
        return generation_requests

    def text_ids(self, prompt: str | list[int], info: ModelInfo, *, has_special: bool) -> list[int]:
        """Return the token ids of a prompt; a prompt of token ids is returned unchanged.

        `has_special` adds the special tokens that the tokenizer puts around a text.
        """
        if not isinstance(prompt, str):
            return prompt
        most = self.limit(info)
        return token_ids(self._tokenizer, prompt, has_special=has_special, most_tokens=most)

    def _request(self, body: Sampling, ids: list[int], info: ModelInfo) -> Request:
        request = body.request(ids, self._room(ids, info))
        _require_known(request.options.stop_token_ids, info, "stop_token_ids")
        _require_known([token for token, _ in request.options.logit_bias], info, "logit_bias")
        return request

    def _room(self, ids: list[int], info: ModelInfo) -> int:
        """Return the most tokens that the answer to a prompt may have, at least 1.

        Raises `ApiError` for an empty prompt or unknown token ids, and `TextTooLongError` for a
        prompt that leaves no room for an answer.
        """
        if not ids:
            raise ApiError(400, "the prompt is empty; give some text")
        _require_known(ids, info, "prompt")
        limit = self.limit(info)
        if limit is None:
            return 2**31
        if len(ids) >= limit:
            raise TextTooLongError(len(ids), limit)
        return limit - len(ids)

    def limit(self, info: ModelInfo | None) -> int | None:
        """Return how many tokens prompt and answer may have together; None: no limit is set."""
        model = None if info is None else info.context
        limits = [limit for limit in (self._context, model) if limit is not None]
        return min(limits, default=None)

    def _thinking(self, body: ChatRequest, prompt: ChatPrompt) -> ThinkingLimit | None:
        """Return the limit of reasoning tokens; None: none is set, or the model does not reason."""
        if body.thinking_tokens is None or not self._format.thinks:
            return None
        dialect = self._format.dialect
        return ThinkingLimit(
            num_tokens=body.thinking_tokens,
            begin=dialect.think.strip(),
            end=dialect.end_think,
            closing=dialect.closing,
            has_begun=prompt.is_thinking,
        )

    def _free(
        self, body: ChatRequest, tools: list[Tool], prompt: ChatPrompt
    ) -> GrammarWriter | None:
        """Return a writer of a grammar that constrains only the tool calls in otherwise free text.

        Returns None without tools, or if the form of the model's calls is unknown.
        """
        native = self._format.native
        if not tools or native is None:
            return None
        return partial(
            free_calls,
            described_tools(tools),
            native,
            is_thinking=prompt.is_thinking,
            can_think=self._format.thinks,
            has_one_call=body.parallel_tool_calls is False,
        )


def _fitting(
    turns: list[dict[str, object]],
    written: Callable[[list[dict[str, object]]], ChatPrompt],
    limit: int | None,
    body: ChatRequest,
) -> tuple[ChatPrompt, int]:
    """Return a conversation's prompt, and how many of its oldest turns were dropped.

    Turns are dropped until the prompt and room for an answer fit `limit` tokens, but never the last
    turn. If `limit` is None, no turn is dropped.
    """
    if limit is None:
        return written(turns), 0
    longest = limit - max(1, min(body.max_answer_tokens or _TRIMMED_ROOM, limit // 4))

    def fits(some: list[dict[str, object]]) -> bool:
        try:
            return len(written(some).ids) <= longest
        except TextTooLongError:
            return False

    kept, num_dropped = trim_conversation(turns, fits)
    return written(kept), num_dropped


def _choices(request: Request, n: int | None) -> list[Request]:
    """Return `request` once for each of `n` choices; None counts as one choice.

    If `request` has a seed, the seeds of the choices are consecutive.
    """
    options = request.options
    if options.seed is None:
        return [request] * (n or 1)
    seeds = ((options.seed + i) % SEEDS for i in range(n or 1))
    return [replace(request, options=replace(options, seed=seed)) for seed in seeds]


def _require_known(ids: Sequence[int], info: ModelInfo, field: str) -> None:
    unknown = next((token for token in ids if not 0 <= token < info.vocabulary), None)
    if unknown is not None:
        raise ApiError(
            400,
            f"token id {unknown} is unknown; this model's are 0 to {info.vocabulary - 1}",
            param=field,
        )


def new_id(prefix: str, mark: str = "-") -> str:
    """Return a unique random id: `prefix`, `mark` and 24 hexadecimal digits."""
    return f"{prefix}{mark}{random.SystemRandom().getrandbits(96):024x}"


def now_seconds() -> int:
    """Return the Unix time in whole seconds, as OpenAI's objects carry it."""
    return int(time.time())
