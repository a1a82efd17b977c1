"""Finds the model that a command names: the demo (built on first use), a directory, a hub id."""

import dataclasses
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tandem.cli.paths import cache_dir
from tandem.core.errors import ModelError
from tandem.offload.options import OffloadOptions

DEMO_MODELS = ("demo", "demo-equal")


def find_model(name: str, *, quiet: bool) -> str:
    """Return a directory or hub id; builds the demo model when it is asked for and not there."""
    if name not in DEMO_MODELS:
        return name
    from tandem.demo import ensure_demo_model

    source = os.environ.get("TANDEM_DEMO_SOURCE")
    directory = ensure_demo_model(
        name,
        cache_dir=cache_dir(),
        source=Path(source).expanduser() if source else None,
        progress=None if quiet else progress_bar(),
    )
    return str(directory)


def progress_bar() -> Callable[[str, int, int], None]:
    """Return a callback (stage, done, total) that draws one bar per stage on standard error."""
    from tqdm import tqdm

    bars: dict[str, Any] = {}

    def update(stage: str, done: int, total: int) -> None:
        if stage not in bars:
            for bar in bars.values():
                bar.close()
            bars[stage] = tqdm(total=total, desc=stage, unit="", file=sys.stderr, leave=True)
        bars[stage].update(done - bars[stage].n)
        if done >= total:
            bars[stage].close()

    return update


def load_model_and_tokenizer(
    name: str, offload: OffloadOptions, *, quiet: bool, dense_dtype: str = "none"
) -> tuple[Any, Any]:
    """Load a model through Tandem, and its tokenizer; progress goes to standard error."""
    import tandem

    source = find_model(name, quiet=quiet)
    calm_transformers(quiet)
    names = [field.name for field in dataclasses.fields(OffloadOptions)]
    model = tandem.load(
        source,
        isa=os.environ.get("TANDEM_ISA"),
        cache_dir=str(cache_dir()),
        dense_dtype=dense_dtype,
        **{name: getattr(offload, name) for name in names},
    )
    return model, load_tokenizer(source)


def load_tokenizer(source: str) -> Any:
    """Load the tokenizer of a model directory or hub id."""
    from transformers import AutoTokenizer

    try:
        if source.endswith(".gguf"):  # the tokenizer is in the file
            file = Path(source)
            return AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
        return AutoTokenizer.from_pretrained(source)
    except (OSError, ValueError) as error:
        first_line = str(error).partition("\n")[0]
        raise ModelError(f"{source} has no tokenizer that loads: {first_line}") from error


def calm_transformers(quiet: bool) -> None:
    """Leave to Transformers its errors and its loading bar; the rest is not for this user."""
    from transformers.utils import logging

    logging.set_verbosity_error()
    if quiet or not sys.stderr.isatty():
        logging.disable_progress_bar()
