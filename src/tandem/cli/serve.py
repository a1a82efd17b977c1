"""`tandem serve`: an OpenAI-compatible server, and a page at its address."""

import argparse
import functools
import json
import logging
import sys
from dataclasses import dataclass
from pathlib import Path

from tandem.cli.images import load_image_reader
from tandem.cli.keeping import Keeper, KeepOptions
from tandem.cli.model_choice import (
    DENSE_DTYPE_HELP,
    ModelChoice,
    add_model,
    find_model,
    load_model_and_tokenizer,
    load_tokenizer,
)
from tandem.core.config import add_flags, from_flags, option
from tandem.core.errors import ConfigError
from tandem.devices.options import OffloadOptions, offload_options
from tandem.server.options import ServerOptions, require_key

_EXTRA = {"fastapi", "uvicorn", "prometheus_client", "llguidance", "pydantic"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeOptions:
    """Options of `tandem serve`, apart from the server's and the model's."""

    dense_dtype: str = option(
        "auto",
        help=DENSE_DTYPE_HELP,
        metavar="DTYPE",
    )
    compile: bool = option(
        True, help="record decode steps and replay them without the model's Python code"
    )
    json: bool = option(False, help="print one JSON object with the address when ready")
    quiet: bool = option(False, help="print only warnings and errors", short="-q")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `tandem serve`."""
    add_model(parser, loads=True)
    add_flags(parser, ServerOptions)
    add_flags(parser, OffloadOptions)
    add_flags(parser, ServeOptions)
    add_flags(parser, KeepOptions)


def run(flags: argparse.Namespace) -> int:
    """Serve until a signal; returns the exit code."""
    options = from_flags(ServerOptions, flags)
    offload, own = offload_options(flags), from_flags(ServeOptions, flags)
    try:
        from tandem.apis.images import allowed_directory
        from tandem.cli.served import engine_settings, served_offload, server_keys
        from tandem.server.serving import Source, serve
    except ModuleNotFoundError as error:
        if error.name not in _EXTRA:
            raise
        raise ConfigError(
            f"the server needs {error.name}, which is not installed; "
            'pip install "tandem-moe[server]"'
        ) from error
    api_keys = server_keys(options)
    require_key(options.host, api_keys)
    directory = allowed_directory(options.image_files)
    level = logging.WARNING if own.quiet else logging.INFO
    logging.basicConfig(level=level, stream=sys.stderr, format="%(asctime)s %(message)s")
    found = find_model(from_flags(ModelChoice, flags), quiet=own.quiet)
    source = Source(
        name=options.names(Path(flags.model).name)[0],
        load_model=functools.partial(
            load_model_and_tokenizer,
            found,
            served_offload(offload, options),
            quiet=True,
            dense_dtype=own.dense_dtype,
            keeper=Keeper(from_flags(KeepOptions, flags), quiet=own.quiet, may_ask=False),
        ),
        load_tokenizer=functools.partial(load_tokenizer, found),
        load_images=functools.partial(load_image_reader, found, directory),
    )
    settings = engine_settings(options, found, quiet=own.quiet, has_replay=own.compile)
    serve(
        source, options, settings, api_keys=api_keys,
        on_ready=functools.partial(_announce, source.name, own),
    )  # fmt: skip
    return 0


def _announce(name: str, own: ServeOptions, address: str) -> None:
    if own.json:
        print(json.dumps({"address": address, "model": name}), flush=True)
    elif not own.quiet:
        print(f"{name} answers at {address} (API: {address}/v1)", flush=True)
