"""`tandem run`: answer one prompt (-p, a pipe, or both) or chat on a terminal."""

import argparse

from tandem.cli.failures import EXIT_INTERRUPTED
from tandem.cli.models import ModelChoice, add_model, load_model_and_tokenizer
from tandem.cli.session import Session, SessionOptions
from tandem.cli.streams import has_piped_input, read_input, require_text
from tandem.core.config import add_flags, from_flags
from tandem.core.errors import ConfigError
from tandem.generate.sampling import SamplingOptions
from tandem.offload.options import OffloadOptions


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `tandem run`."""
    add_model(parser)
    parser.add_argument(
        "-p", "--prompt", help="answer this and exit; text from a pipe is put before it"
    )
    add_flags(parser, SamplingOptions)
    parser.add_argument(
        "--stop", action="append", metavar="TEXT",
        help="end the answer before this text; may be given several times",
    )  # fmt: skip
    add_flags(parser, OffloadOptions)
    add_flags(parser, SessionOptions)


def run(flags: argparse.Namespace) -> int:
    """Answer or chat; returns the exit code."""
    options = from_flags(SessionOptions, flags)
    flags.stop = tuple(require_text(text, "--stop") for text in flags.stop or ())
    if not all(flags.stop):
        raise ConfigError("--stop is empty; give some text that ends an answer")
    sampling = from_flags(SamplingOptions, flags)
    prompt = _one_prompt(flags.prompt)
    offload = from_flags(OffloadOptions, flags)
    model, tokenizer = load_model_and_tokenizer(
        from_flags(ModelChoice, flags),
        offload,
        quiet=options.quiet,
        dense_dtype=options.dense_dtype,
    )
    session = Session(model, tokenizer, options, sampling)
    if prompt is None:
        from tandem.cli.chat import chat

        return chat(session)
    return EXIT_INTERRUPTED if session.ask(prompt).is_interrupted else 0


def _one_prompt(given: str | None) -> str | None:
    """Return the text of a pipe followed by that of -p; None on a terminal, which means chat."""
    if given is None:
        prompt = read_input()
        if prompt is None:
            return None
    else:
        piped = read_input() if has_piped_input() else None
        prompt = f"{piped.rstrip()}\n\n{given}" if piped and piped.strip() else given
    if not require_text(prompt, "the prompt").strip():
        raise ConfigError("the prompt is empty; give some text with -p or on standard input")
    return prompt
