"""A conversation with a loaded model: its messages, its context, and what each turn prints."""

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, ClassVar

from tandem.cli.keeping import Keeper, cache_dir
from tandem.cli.model_choice import DENSE_DTYPE_HELP
from tandem.cli.streams import require_text
from tandem.core.config import option
from tandem.core.errors import ConfigError
from tandem.foreign_types import PreTrainedModel, Tokenizer
from tandem.generate.conversation import trim_conversation
from tandem.generate.sampling import SamplingOptions
from tandem.generate.speculation import SPECULATE, require_one_drafter

if TYPE_CHECKING:
    from PIL.Image import Image

    from tandem.cli.drafting import DraftChoice
    from tandem.cli.explain import Explanation
    from tandem.cli.report import RunReport
    from tandem.decode.images import ImagePrompt
    from tandem.generate.answer import Answer
    from tandem.generate.generator import Generator
    from tandem.generate.images import Processor
    from tandem.generate.prompt import Message

# A conversation is trimmed when the context has less room than the longest answer, or than a
# quarter of the context if that is less. It is trimmed to half of the context because every trim
# costs a whole prefill.
_ROOM_FOR_ANSWER = 1 / 4
_TRIMMED_TO = 1 / 2


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionOptions:
    """Options of `tandem run` and `chat`, apart from the model's, offloading and sampling."""

    rare: ClassVar[tuple[str, ...]] = ("kv_dtype", "compile")
    system: str | None = option(None, help="system message of the conversation", metavar="TEXT")
    context_full: str = option(
        "trim",
        help="when a chat fills the model's context: trim drops its oldest turns, stop refuses",
        choices=("trim", "stop"),
    )
    dense_dtype: str = option(
        "auto",
        help=DENSE_DTYPE_HELP,
        metavar="DTYPE",
    )
    kv_dtype: str = option(
        "auto",
        help="keys and values of earlier tokens: auto (what the model computes in), bf16, int8",
        metavar="DTYPE",
    )
    compile: bool = option(
        True, help="record decode steps and replay them without the model's Python code"
    )
    speculate: str = option(
        "auto",
        help="draft tokens and verify them in one step where that pays; answers stay the same: "
        "auto, lookup (what followed the same words before), mtp (also the model's MTP layers), "
        "none",
        choices=SPECULATE,
    )
    draft: str | None = option(
        None, help="small model with the same vocabulary that drafts tokens", metavar="MODEL"
    )
    json: bool = option(False, help="print one JSON object on the last line of standard output")
    explain: bool = option(False, help="explain the speed, and what single changes would gain")
    live: bool = option(
        False, help="draw below the answer which experts it uses, where they are, and the speed"
    )
    quiet: bool = option(
        False, help="print only the answer: no progress, statistics or warnings", short="-q"
    )
    history: bool = option(
        True, help="keep what you type in a chat for the up arrow of the next chat"
    )

    def __post_init__(self) -> None:
        """Check that the system message is valid text, and that no two options conflict."""
        require_text(self.system or "", "--system")
        require_one_drafter(self.speculate, self.draft)
        if self.live and self.quiet:
            raise ConfigError("--live draws and --quiet draws nothing; give one of them")


class Session:
    """A conversation with a loaded model: keeps its messages, prints answers and statistics."""

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: Tokenizer,
        options: SessionOptions,
        sampling: SamplingOptions,
        keeper: Keeper | None = None,
        *,
        processor: "Processor | None" = None,
        images: "Sequence[Image]" = (),
        drafting: "DraftChoice | None" = None,
    ) -> None:
        """Start a conversation, with the system message if there is one.

        The first message has the `images`, which the model's `processor` reads.
        """
        self._drafting = drafting
        self._processor, self._images = processor, list(images)
        self._keeper = keeper
        self._model = model
        self._tokenizer = tokenizer
        self.options = options
        self.sampling = sampling
        self._messages: list[Message] = []
        self._generator: Generator | None = None
        self._has_printed_why_slower = False
        self.clear()

    def finish(self) -> None:
        """Wait until the packed copy is written, if one is being written."""
        if self._keeper is not None:
            self._keeper.finish()

    @property
    def messages(self) -> "list[Message]":
        """The conversation, a system message included."""
        return list(self._messages)

    def go_on_from(self, messages: "list[Message]") -> None:
        """Replace the conversation and its system message by `messages`."""
        first = [str(each["content"]) for each in messages[:1] if each["role"] == "system"]
        self.options = replace(self.options, system=first[0] if first else None)
        self._messages = list(messages)

    def clear(self) -> None:
        """Forget all messages except the system message."""
        self._messages = []
        if self.options.system is not None:
            self._messages.append({"role": "system", "content": self.options.system})

    def set_system(self, text: str | None) -> None:
        """Replace or remove the system message; the other messages stay."""
        self.options = replace(self.options, system=text)
        messages = [message for message in self._messages if message["role"] != "system"]
        self.clear()
        self._messages += messages

    def regenerate(self) -> "Answer":
        """Print and keep a new answer to the last user message, in place of the earlier answer.

        Raises `ConfigError` if there is no answer yet. On an error the conversation stays as it
        was.
        """
        kept = self._messages
        if not kept or kept[-1]["role"] != "assistant":
            raise ConfigError("there is no answer yet; type a message first")
        self._say_if_nothing_is_random()
        self._messages = kept[:-2]
        try:
            return self._answer(kept[-2])
        except BaseException:
            self._messages = kept
            raise

    def ask(self, text: str) -> "Answer":
        """Print the answer to a message while it is generated, and add both to the conversation.

        On an error the conversation stays as it was.
        """
        require_text(text, "the prompt")
        content: str | list[Mapping[str, object]] = text
        if self._images:
            content = [{"type": "image", "image": image} for image in self._images]
            content.append({"type": "text", "text": text})
        answer = self._answer({"role": "user", "content": content})
        self._images = []
        return answer

    def _answer(self, message: "Message") -> "Answer":
        from tandem.cli.report import RunReport

        messages, prompt = self._fit([*self._messages, message])
        report = RunReport(self._model)
        try:
            generator = self._ready_generator()
            report.count_drafts(generator.speculation)
            explanation = self._begin_explanation(generator)
            answer = self._shown(generator, prompt)
            self._messages = [*messages, {"role": "assistant", "content": answer.text}]
            self._print_statistics(answer, report, explanation)
        finally:
            report.close()
        return answer

    def _shown(self, generator: "Generator", prompt: "tuple[int, ...] | ImagePrompt") -> "Answer":
        """Generate an answer, print it piece by piece, and return it."""
        if self.options.live:
            from tandem.cli.live import LivePanel

            with LivePanel(self._model, sys.stderr) as panel:
                answer = generator.answer(prompt, self.sampling, panel.show)
        else:
            answer = generator.answer(prompt, self.sampling, partial(print, end="", flush=True))
        print(flush=True)
        return answer

    def _ready_generator(self) -> "Generator":
        """Return the conversation's generator, which holds the KV cache; make it on first use."""
        from tandem.generate.generator import Generator

        if self._generator is None:
            self._generator = Generator(
                self._model,
                self._tokenizer,
                kv_dtype=self.options.kv_dtype,
                has_replay=self.options.compile,
                speculate=self.options.speculate,
                **({} if self._drafting is None else self._drafting.load(self._tokenizer)),
            )
            self._generator.warm_up(cache_dir() / "trials")
        return self._generator

    def _begin_explanation(self, generator: "Generator") -> "Explanation | None":
        if not self.options.explain:
            return None
        from tandem.cli.explain import Explanation

        return Explanation(self._model, generator)

    def _print_statistics(
        self, answer: "Answer", report: "RunReport", explanation: "Explanation | None"
    ) -> None:
        if not self.options.quiet:
            print(report.line(answer), file=sys.stderr)
            self._say_why_slower()
        statistics = report.json(answer)
        if explanation is not None:
            text, numbers = explanation.finish(answer)
            print(text, file=sys.stderr)
            statistics |= numbers
        if self.options.json:
            print(json.dumps(statistics), flush=True)

    def _fit(
        self, messages: "list[Message]"
    ) -> "tuple[list[Message], tuple[int, ...] | ImagePrompt]":
        """Return the messages that fit into the context, and their prompt.

        Raises `ConfigError` if the conversation is too long and the user chose not to trim it. A
        single message that is too long is returned; the generator then raises an error.
        """
        from tandem.generate.next_token_models import context_tokens

        prompt = self._encode(messages)
        num_tokens, longest = _length(prompt), context_tokens(self._model)
        if longest is None:
            return messages, prompt
        if self.options.context_full == "trim":
            room = min(self.sampling.max_new_tokens, int(longest * _ROOM_FOR_ANSWER))
            is_full = num_tokens + room > longest
            return self._trim(messages, longest) if is_full else (messages, prompt)
        if num_tokens >= longest and len(self._messages) > 1:
            raise ConfigError(
                f"with this message the conversation has {num_tokens} tokens and the model's "
                f"context is {longest}; /clear forgets the conversation, and --context-full trim "
                "drops its oldest turns"
            )
        return messages, prompt

    def _trim(
        self, messages: "list[Message]", longest: int
    ) -> "tuple[list[Message], tuple[int, ...] | ImagePrompt]":
        kept, num_dropped = trim_conversation(
            messages, lambda some: _length(self._encode(some)) <= longest * _TRIMMED_TO
        )
        prompt = self._encode(kept)
        if num_dropped and _length(prompt) < longest:
            turns = "turn is" if num_dropped == 1 else f"{num_dropped} turns are"
            print(
                f"[the conversation fills the model's context of {longest} tokens: its oldest "
                f"{turns} dropped]",
                file=sys.stderr,
            )
        return kept, prompt

    def _encode(self, messages: "list[Message]") -> "tuple[int, ...] | ImagePrompt":
        from tandem.generate.prompt import encode_messages

        found = encode_messages(self._model, self._tokenizer, self._processor, messages)
        return tuple(found) if isinstance(found, list) else found

    def _say_if_nothing_is_random(self) -> None:
        model_samples = bool(self._model.generation_config.do_sample)
        if self.sampling.seed is not None:
            why = "the seed is fixed; /set seed N changes it"
        elif not self.sampling.is_sampled(model_samples):
            why = "the most likely token is always chosen; /set temperature 0.8 samples"
        else:
            return
        if not self.options.quiet:
            print(f"[the answer will be the same: {why}]", file=sys.stderr)

    def _say_why_slower(self) -> None:
        """If steps are slower than possible, print the reason, once in a session."""
        why = self._generator.why_slower if self._generator is not None else None
        if why is not None and not self._has_printed_why_slower:
            self._has_printed_why_slower = True
            print(f"[slower than possible: {why}]", file=sys.stderr)


def _length(prompt: "tuple[int, ...] | ImagePrompt") -> int:
    return len(prompt) if isinstance(prompt, tuple) else len(prompt.ids)
