"""`tandem pack`: writes a model as a packed checkpoint, which loads at the disk's speed."""

import argparse
import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tandem.checkpoint.hub_sums import write_sums
from tandem.checkpoint.model_card import (
    Origin,
    copy_licences,
    origin_of,
    read_reports,
    write_card,
)
from tandem.checkpoint.packed import INDEX_FILE, require_new
from tandem.cli.keeping import cache_dir
from tandem.cli.model_choice import ModelChoice, add_model, find_model, import_transformers
from tandem.cli.progress import PackingBar
from tandem.cli.streams import require_text
from tandem.core.config import add_flags, from_flags, helps, option, require_range
from tandem.core.errors import ConfigError
from tandem.core.units import format_bytes, parse_bytes
from tandem.devices.options import OffloadOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class PackOptions:
    """Options of `tandem pack`."""

    output: str | None = option(
        None, help="directory to create (default: beside the model)", metavar="DIR"
    )
    expert_dtype: str = option(
        "auto", help="format of the experts: auto (as they are), int4, int8, bf16, ...",
        metavar="DTYPE",
    )  # fmt: skip
    dense_dtype: str = option(
        "none", help="format of linear layers: none (as they are), int8, int4, ...", metavar="DTYPE"
    )
    importance: str | None = option(None, help=helps(OffloadOptions)["importance"], metavar="FILE")
    size: str | None = option(
        None, help="choose a format for each part so that the packed model has this size (16GB) "
        "and loses least; --importance is then auto", metavar="SIZE",
    )  # fmt: skip
    bits: float | None = option(
        None, help="like --size, in mean bits per weight of the whole model", metavar="N"
    )
    for_hub: bool = option(
        False,
        help="also write a model card and checksums of all files; for a packed MODEL, only these",
    )
    quiet: bool = option(False, help="show no progress", short="-q")
    json: bool = option(False, help="print one JSON object on the last line of standard output")

    def __post_init__(self) -> None:
        """Check the ranges, and raise `ConfigError` for options that exclude each other."""
        if self.bits is not None:
            require_range("bits", self.bits, 1, 16, what="a number of bits")
        if self.size is not None:
            parse_bytes(self.size)
        if self.size is not None and self.bits is not None:
            raise ConfigError("--size and --bits set the same thing; give one of them")
        if self.has_budget and (self.expert_dtype, self.dense_dtype) != ("auto", "none"):
            raise ConfigError(
                "--size and --bits choose the formats; leave --expert-dtype and --dense-dtype out"
            )

    @property
    def has_budget(self) -> bool:
        """Whether --size or --bits is given, so that formats are chosen for that size."""
        return self.size is not None or self.bits is not None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `tandem pack`."""
    add_model(parser, is_required=True)
    parser.add_argument("-o", dest="output", metavar="DIR", help="short for --output")
    add_flags(parser, PackOptions)
    parser.add_argument(
        "--measured", action="append", metavar="FILE",
        help="losses or speed for the card of --for-hub: what tandem quality --json or tandem "
        "bench --json printed; repeatable",
    )  # fmt: skip


def run(flags: argparse.Namespace) -> int:
    """Pack the model, or describe a packed one for the hub; returns the exit code."""
    options = from_flags(PackOptions, flags)
    choice = from_flags(ModelChoice, flags)
    if flags.measured and not options.for_hub:
        raise ConfigError("--measured is for the card of --for-hub; give both")
    reports = read_reports(flags.measured or ())
    if options.for_hub and (Path(choice.model or "") / INDEX_FILE).is_file():
        return _describe(Path(choice.model), options, reports)
    chosen = options.size or (f"{options.bits}bits" if options.bits else options.expert_dtype)
    own_name = f"{Path(choice.model).name}-{chosen}-tandem"
    target = Path(require_text(options.output or own_name, "--output"))
    require_new(target)  # before downloading or building a model and importing torch
    import_transformers(quiet=options.quiet, has_bars=False)

    from tandem.hf.pack import pack

    found = find_model(choice, quiet=options.quiet)
    begin = time.perf_counter()
    formats: dict[str, Any] = {
        "expert_dtype": options.expert_dtype,
        "dense_dtype": options.dense_dtype,
        "importance": options.importance,
    }
    if options.has_budget:
        formats = choose_formats(options, found)
    progress = None if options.quiet else PackingBar()
    try:
        packed = pack(
            found.model,
            target,
            trust_remote_code=found.trust_remote_code,
            on_progress=progress,
            cache_dir=str(cache_dir()),
            **formats,
        )
    except KeyboardInterrupt:
        print("\ninterrupted; the same command continues where it stopped", file=sys.stderr)
        raise
    finally:
        if progress is not None:
            progress.close()
    if options.for_hub:
        source = Path(found.model)
        origin = origin_of(source if source.is_dir() else source.parent, choice.model)
        copy_licences(source, target)
        write_card(target, origin, reports)
        write_sums(target)
        _say_what_lacks(origin)
    seconds = time.perf_counter() - begin
    resumed = f", {packed.resumed_layers} layers reused" if packed.resumed_layers else ""
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
        for name in ("expert_formats", "dense_formats"):
            report |= {name: formats[name]} if name in formats else {}
        print(json.dumps(report))
    return 0


def _describe(directory: Path, options: PackOptions, reports: list[dict[str, Any]]) -> int:
    """Write the card and the checksums of a packed model; returns the exit code."""
    if options.output is not None:
        raise ConfigError(f"{directory} is packed already; leave --output out")
    origin = origin_of(directory, str(directory))
    card = write_card(directory, origin, reports)
    sums = write_sums(directory)
    print(f"wrote {card} and {sums}")
    _say_what_lacks(origin)
    if options.json:
        print(json.dumps({"directory": str(directory), "card": str(card), "sums": str(sums)}))
    return 0


def _say_what_lacks(origin: Origin) -> None:
    lacks = [
        *["base_model"] * (origin.base_model is None),
        *["license"] * (origin.licence is None),
    ]
    if lacks:
        print(
            f"the card has no {' and no '.join(lacks)}: write them into its first lines before you "
            "publish it, then run tandem pack DIR --for-hub again"
        )


def choose_formats(options: PackOptions, found: ModelChoice) -> dict[str, object]:
    """Choose and print the formats for a size; return them as arguments of `pack`.

    The losses of the model's parts in each format are measured first.
    """
    from tandem.hf.checkpoint import open_model
    from tandem.hf.config import OffloadConfig
    from tandem.quality.recipe import measure_parts

    checkpoint = open_model(Path(found.model), may_run_code=found.trust_remote_code)
    importance = options.importance or "auto"
    offload = OffloadConfig(importance=importance, cache_dir=str(cache_dir()))
    progress = None if options.quiet else PackingBar("measuring experts")
    try:
        measured = measure_parts(checkpoint, offload, progress)
    finally:
        if progress is not None:
            progress.close()
    if options.size is not None:
        num_bytes = parse_bytes(options.size)
    else:
        num_bytes = int((options.bits or 0) * measured.num_weights / 8)
    recipe = measured.recipe(num_bytes)
    print("\n".join(recipe.lines()))
    bits = 8 * recipe.num_bytes / recipe.num_weights
    print(f"{format_bytes(recipe.num_bytes)}, {bits:.2f} bits a weight")
    return recipe.options() | {"importance": importance}
