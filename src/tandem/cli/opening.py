"""Opens a session from the flags that `tandem run` and `tandem chat` share."""

import argparse
import sys

from tandem.cli.drafting import DraftChoice
from tandem.cli.images import load_processor, open_images
from tandem.cli.keeping import Keeper, KeepOptions
from tandem.cli.model_choice import ModelChoice, add_model, load_model_and_tokenizer
from tandem.cli.session import Session, SessionOptions
from tandem.cli.streams import require_text
from tandem.core.config import add_flags, from_flags
from tandem.core.errors import ConfigError
from tandem.devices.options import OffloadOptions, offload_options
from tandem.generate.sampling import SamplingOptions


def add_session_arguments(parser: argparse.ArgumentParser) -> None:
    """Add MODEL and the flags of a session."""
    add_model(parser, loads=True)
    add_flags(parser, SamplingOptions)
    parser.add_argument(
        "--stop", action="append", metavar="TEXT",
        help="end the answer before this text; repeatable",
    )  # fmt: skip
    add_flags(parser, OffloadOptions)
    add_flags(parser, SessionOptions)
    add_flags(parser, KeepOptions)


class SessionPlan:
    """The options of a session, checked before the model is loaded."""

    def __init__(self, flags: argparse.Namespace) -> None:
        """Check the flags; raises `ConfigError` that names the wrong flag."""
        self._options = from_flags(SessionOptions, flags)
        if self._options.live:
            from tandem.cli.live import require_terminal

            require_terminal(sys.stderr)
        flags.stop = tuple(require_text(text, "--stop") for text in flags.stop or ())
        if not all(flags.stop):
            raise ConfigError("--stop is empty; give some text that ends an answer")
        self._sampling = from_flags(SamplingOptions, flags)
        self._offload = offload_options(flags)
        self._choice = from_flags(ModelChoice, flags)
        self._keep = from_flags(KeepOptions, flags)
        self._images = open_images(vars(flags).get("image") or ())

    def open(self) -> Session:
        """Load the model and start the session."""
        processor = load_processor(self._choice) if self._images else None
        keeper = Keeper(self._keep, quiet=self._options.quiet)
        model, tokenizer = load_model_and_tokenizer(
            self._choice,
            self._offload,
            quiet=self._options.quiet,
            dense_dtype=self._options.dense_dtype,
            keeper=keeper,
        )
        return Session(
            model, tokenizer, self._options, self._sampling, keeper,
            processor=processor, images=self._images,
            drafting=DraftChoice(self._choice, self._options.draft, quiet=self._options.quiet),
        )  # fmt: skip
