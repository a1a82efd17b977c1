"""`tandem run`: answer one prompt (-p, a pipe, or both) or chat on a terminal."""

import argparse

from tandem.cli.chat import chat
from tandem.cli.failures import EXIT_INTERRUPTED
from tandem.cli.images import add_images
from tandem.cli.opening import SessionPlan, add_session_arguments
from tandem.cli.streams import has_piped_input, read_input, require_text
from tandem.core.errors import ConfigError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `tandem run`."""
    parser.add_argument(
        "-p", "--prompt", help="answer this prompt and exit; piped text is put before it"
    )
    add_images(parser)
    add_session_arguments(parser)


def run(flags: argparse.Namespace) -> int:
    """Answer one prompt, or chat without one; returns the exit code."""
    plan = SessionPlan(flags)
    prompt = _one_prompt(flags.prompt)
    session = plan.open()
    if prompt is None:
        return chat(session)
    is_interrupted = session.ask(prompt).is_interrupted
    session.finish()
    return EXIT_INTERRUPTED if is_interrupted else 0


def _one_prompt(given: str | None) -> str | None:
    """Return piped text followed by the text of -p; None without both, so that a chat begins."""
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
