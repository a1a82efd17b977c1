"""`tandem run`: answer one prompt (-p, or a pipe) or chat on a terminal."""

import argparse
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tandem.cli.models import ModelChoice, add_model, load_model_and_tokenizer
from tandem.core.config import add_flags, from_flags, option
from tandem.core.errors import ConfigError
from tandem.generate.sampling import SamplingOptions
from tandem.offload.options import OffloadOptions

if TYPE_CHECKING:
    from tandem.generate.generator import Generator
    from tandem.generate.prompt import Message


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """What `tandem run` knows beside the sampling options."""

    system: str | None = option(None, help="system message of the conversation", metavar="TEXT")
    dense_dtype: str = option(
        "auto",
        help="attention, shared experts and head on the CPU: none (as loaded), int8, int4, bf16; "
        "auto: int8 if the experts are quantised too",
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
    json: bool = option(False, help="last line of standard output: one JSON object")
    explain: bool = option(
        False, help="say why it was as fast as it was, and what one change would bring"
    )
    quiet: bool = option(False, help="only the answer: no progress, no statistics")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `tandem run`."""
    add_model(parser)
    parser.add_argument("-p", "--prompt", help="answer this and exit")
    add_flags(parser, SamplingOptions)
    parser.add_argument(
        "--stop", action="append", metavar="TEXT",
        help="end the answer before this text; may be given several times",
    )  # fmt: skip
    add_flags(parser, OffloadOptions)
    add_flags(parser, RunOptions)


def run(flags: argparse.Namespace) -> int:
    """Answer or chat; returns the exit code."""
    options = from_flags(RunOptions, flags)
    flags.stop = tuple(flags.stop or ())
    sampling = from_flags(SamplingOptions, flags)
    prompt = _one_prompt(flags.prompt)
    offload = from_flags(OffloadOptions, flags)
    session = _open_session(from_flags(ModelChoice, flags), options, offload, sampling)
    if prompt is None:
        from tandem.cli.chat import chat

        return chat(session)
    session.ask(prompt)
    return 0


def _one_prompt(given: str | None) -> str | None:
    """Return the prompt of -p or of a pipe; None on a terminal, which means chat."""
    if given is None:
        if sys.stdin.isatty():
            return None
        given = sys.stdin.read()
    if not given.strip():
        raise ConfigError("the prompt is empty; give some text with -p or on standard input")
    return given


def _open_session(
    choice: ModelChoice, options: RunOptions, offload: OffloadOptions, sampling: SamplingOptions
) -> "Session":
    model, tokenizer = load_model_and_tokenizer(
        choice, offload, quiet=options.quiet, dense_dtype=options.dense_dtype
    )
    return Session(model, tokenizer, options, sampling)


class Session:
    """A conversation with a loaded model: keeps its messages, prints answers and statistics."""

    def __init__(
        self, model: Any, tokenizer: Any, options: RunOptions, sampling: SamplingOptions
    ) -> None:
        """Start a conversation, with the system message if there is one."""
        self._model = model
        self._tokenizer = tokenizer
        self._options = options
        self._sampling = sampling
        self._messages: list[Message] = []
        self._generator: Generator | None = None
        self._has_said_why_slower = False
        self.clear()

    def clear(self) -> None:
        """Forget the conversation but for the system message."""
        self._messages.clear()
        if self._options.system is not None:
            self._messages.append({"role": "system", "content": self._options.system})

    def ask(self, text: str) -> None:
        """Print the answer to a message as it comes, and keep both in the conversation."""
        from tandem.cli.report import RunReport
        from tandem.generate.generator import Generator
        from tandem.generate.prompt import encode_conversation
        from tandem.generate.stream import generate_answer

        self._messages.append({"role": "user", "content": text})
        report = RunReport(self._model)
        prompt_ids = encode_conversation(self._tokenizer, self._messages)
        self._generator = self._generator or Generator(
            self._model,
            self._tokenizer,
            kv_dtype=self._options.kv_dtype,
            has_replay=self._options.compile,
        )
        explanation = None
        if self._options.explain:
            from tandem.cli.explain import Explanation

            explanation = Explanation(self._model, self._generator)
        answer = generate_answer(
            self._model,
            self._tokenizer,
            prompt_ids,
            self._sampling,
            _print_piece,
            generator=self._generator,
        )
        print(flush=True)
        self._messages.append({"role": "assistant", "content": answer.text})
        if not self._options.quiet:
            print(report.line(answer), file=sys.stderr)
            self._say_why_slower()
        if explanation is not None:
            print(explanation.text(), file=sys.stderr)
        if self._options.json:
            print(report.json(answer), flush=True)
        report.close()

    def _say_why_slower(self) -> None:
        """Say once in a session that steps run the model's own code, and why."""
        why = self._generator.why_slower if self._generator is not None else None
        if why is not None and not self._has_said_why_slower:
            self._has_said_why_slower = True
            print(f"[slower than it could be: {why}]", file=sys.stderr)


def _print_piece(piece: str) -> None:
    print(piece, end="", flush=True)
