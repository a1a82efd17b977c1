"""`tandem pack`: write a model as a packed checkpoint, which loads at the disk's speed."""

import argparse
import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from tandem.checkpoint.packed import require_new
from tandem.cli.keeping import cache_dir
from tandem.cli.model_choice import ModelChoice, add_model, find_model, import_transformers
from tandem.cli.progress import PackingBar
from tandem.cli.streams import require_text
from tandem.core.config import add_flags, from_flags, helps, option
from tandem.core.units import format_bytes
from tandem.devices.options import OffloadOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class PackOptions:
    """Options of `tandem pack`."""

    output: str | None = option(
        None, help="new directory (default: beside the model)", metavar="DIR"
    )
    expert_dtype: str = option(
        "auto", help="format of the experts: auto (as they are), int4, int8, bf16, ...",
        metavar="DTYPE",
    )  # fmt: skip
    dense_dtype: str = option(
        "none", help="format of linear layers: none (as they are), int8, int4, ...", metavar="DTYPE"
    )
    importance: str | None = option(None, help=helps(OffloadOptions)["importance"], metavar="FILE")
    quiet: bool = option(False, help="no progress", short="-q")
    json: bool = option(False, help="last line of standard output: one JSON object")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `tandem pack`."""
    add_model(parser, is_required=True)
    parser.add_argument("-o", dest="output", metavar="DIR", help="short for --output")
    add_flags(parser, PackOptions)


def run(flags: argparse.Namespace) -> int:
    """Pack; returns the exit code."""
    options = from_flags(PackOptions, flags)
    choice = from_flags(ModelChoice, flags)
    own_name = f"{Path(choice.model).name}-{options.expert_dtype}-tandem"
    target = Path(require_text(options.output or own_name, "--output"))
    require_new(target)  # before a model is downloaded or built, and torch is imported
    import_transformers(quiet=options.quiet, has_bars=False)

    from tandem.hf.pack import pack

    found = find_model(choice, quiet=options.quiet)
    progress = None if options.quiet else PackingBar()
    begin = time.perf_counter()
    try:
        packed = pack(
            found.model,
            target,
            trust_remote_code=found.trust_remote_code,
            on_progress=progress,
            expert_dtype=options.expert_dtype,
            dense_dtype=options.dense_dtype,
            importance=options.importance,
            cache_dir=str(cache_dir()),
        )
    except KeyboardInterrupt:
        print("\ninterrupted; the same command goes on where it stopped", file=sys.stderr)
        raise
    finally:
        if progress is not None:
            progress.close()
    seconds = time.perf_counter() - begin
    resumed = f", {packed.resumed_layers} layers were there" if packed.resumed_layers else ""
    print(
        f"packed {format_bytes(packed.num_bytes)} into {target} in {seconds:.1f} s{resumed}; "
        f"now: tandem run {target}"
    )
    if options.json:
        report = {
            "directory": str(target),
            "bytes": packed.num_bytes,
            "seconds": seconds,
            "resumed_layers": packed.resumed_layers,
        }
        print(json.dumps(report))
    return 0
