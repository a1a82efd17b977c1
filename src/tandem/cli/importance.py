"""`tandem importance`: collect the importance of the inputs of a model's matrices."""

import argparse
import functools
import json
import time
from dataclasses import dataclass
from pathlib import Path

from tandem.cli.keeping import Keeper, KeepOptions, cache_dir
from tandem.cli.model_choice import (
    ModelChoice,
    add_model,
    find_model,
    load_model_and_tokenizer,
    progress_bar,
)
from tandem.core.config import add_flags, from_flags, option, require_range
from tandem.core.errors import ConfigError
from tandem.core.units import format_bytes
from tandem.devices.options import OffloadOptions

_LEAST_TOKENS = 16
_PROBE_WINDOW = 64  # tokens; enough context to see the effect of an error


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportanceOptions:
    """Options of `tandem importance`."""

    output: str | None = option(
        None, help="file to write (default: where --importance auto looks for it)", metavar="FILE"
    )
    tokens: int = option(
        16384, help="number of tokens to read, the same from each text", metavar="N"
    )
    probe_tokens: int = option(
        704, help="tokens to find on how much each part of the model matters, which tandem pack "
        "--size asks; 0 leaves it out", metavar="N",
    )  # fmt: skip
    threads: int | None = option(None, help="CPU threads (default: one for each fast core)")
    expert_memory: str = option(
        "auto",
        help="host memory for experts of a packed model (see tandem run --help)",
        metavar="SIZE",
    )
    pack_to_disk: bool | None = option(
        None, help="write a packed copy of a model that does not fit into memory, and run that"
    )
    json: bool = option(False, help="print one JSON object on the last line of standard output")
    quiet: bool = option(False, help="no progress", short="-q")

    def __post_init__(self) -> None:
        """Check the ranges."""
        require_range("probe_tokens", self.probe_tokens, 0, what="a number of tokens")
        require_range("tokens", self.tokens, _LEAST_TOKENS, what="a number of tokens")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `tandem importance`."""
    add_model(parser, loads=True)
    parser.add_argument(
        "--text", action="append", metavar="FILE",
        help="text to read; repeatable (default: text in seven languages and "
        "code, which comes with Tandem)",
    )  # fmt: skip
    parser.add_argument("-o", dest="output", metavar="FILE", help="short for --output")
    add_flags(parser, ImportanceOptions)


def run(flags: argparse.Namespace) -> int:
    """Collect the importance and write it; returns the exit code."""
    options, choice = from_flags(ImportanceOptions, flags), from_flags(ModelChoice, flags)
    if options.output and not Path(options.output).absolute().parent.is_dir():
        raise ConfigError(f"--output: there is no folder {Path(options.output).parent}; make it")
    begin = time.perf_counter()
    path, num_tokens = collect(options, choice, flags.text or ())
    seconds = time.perf_counter() - begin
    size = path.stat().st_size
    print(f"read {num_tokens} tokens in {seconds:.0f} s; {format_bytes(size)} in {path}")
    if options.json:
        report = {"file": str(path), "bytes": size, "tokens": num_tokens, "seconds": seconds}
        print(json.dumps(report))
    return 0


def collect(
    options: ImportanceOptions, choice: ModelChoice, files: list[str] | tuple[()] = ()
) -> tuple[Path, int]:
    """Run texts through a model and write the importance; return its file and the token count."""
    from tandem.quality.texts import cut_windows, learnt_texts, read_texts

    texts = read_texts(files) if files else learnt_texts()
    found = find_model(choice, quiet=options.quiet)
    offload = OffloadOptions(threads=options.threads, expert_memory=options.expert_memory)
    keeper = Keeper(KeepOptions(keep=False, pack_to_disk=options.pack_to_disk), quiet=options.quiet)
    model, tokenizer = load_model_and_tokenizer(found, offload, quiet=options.quiet, keeper=keeper)

    from tandem.checkpoint.importance import Importance, save_importance
    from tandem.hf.checkpoint import open_model
    from tandem.hf.importance import kept_importance
    from tandem.quality.collecting import collect_importance
    from tandem.quality.probing import probe

    windows = cut_windows(texts, tokenizer, options.tokens)
    bar = None if options.quiet else progress_bar()
    tokens, parts = (
        None if bar is None else functools.partial(bar, what) for what in ("tokens", "parts")
    )
    squares = collect_importance(model, windows, tokens)
    divergence = {}
    if options.probe_tokens:
        probes = cut_windows(texts, tokenizer, options.probe_tokens, _PROBE_WINDOW)
        importance = Importance(Path(found.model), squares.get)
        divergence = probe(model, probes, importance, parts)
    model.close()
    checkpoint = open_model(Path(found.model), may_run_code=found.trust_remote_code)
    path = Path(options.output or kept_importance(checkpoint, cache_dir()))
    if not options.output:
        path.parent.mkdir(parents=True, exist_ok=True)
    save_importance(path, squares, divergence)
    return path, sum(len(window.ids) for window in windows)
