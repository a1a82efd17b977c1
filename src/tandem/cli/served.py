"""Turns the server's options into an engine's settings, for `tandem serve` and `cli.replicas`."""

import os
from dataclasses import replace

from tandem.cli.drafting import DraftChoice
from tandem.cli.keeping import cache_dir
from tandem.cli.model_choice import ModelChoice
from tandem.core.errors import ConfigError
from tandem.devices.options import OffloadOptions
from tandem.engine.messages import EngineSettings
from tandem.generate.kept_prefixes import KeptPrefixes
from tandem.server.api_keys import read_keys
from tandem.server.options import ServerOptions


def server_keys(options: ServerOptions) -> tuple[str, ...]:
    """Return the API keys from the options and from TANDEM_API_KEY.

    Raises `ConfigError` if there are none and an option limits what each key may use.
    """
    keys = read_keys(options.api_key, options.api_key_file, os.environ.get("TANDEM_API_KEY"))
    if options.key_flags and not keys:
        raise ConfigError(
            f"{options.key_flags[0]} tells clients apart by their API keys, but no key is given; "
            "give some with --api-key-file"
        )
    return keys


def served_offload(offload: OffloadOptions, options: ServerOptions) -> OffloadOptions:
    """Return the options with memory reserved for the KV cache of all running requests."""
    return replace(offload, context=options.context, sequences=options.max_running)


def engine_settings(
    options: ServerOptions, found: ModelChoice, *, quiet: bool, has_replay: bool = True
) -> EngineSettings:
    """Return the settings of the engine that serves the model `found`."""
    return EngineSettings(
        max_running=options.max_running,
        part_tokens=options.part_tokens,
        has_replay=has_replay,
        speculate=options.speculate,
        load_drafting=DraftChoice(found, options.draft, quiet=quiet).load,
        max_gap=options.max_gap,
        is_isolated=options.isolate_keys,
        kept_prefixes=KeptPrefixes(cache_dir() / "kv", options.kv_disk_bytes)
        if options.kv_disk_bytes
        else None,
    )
