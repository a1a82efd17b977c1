"""`tandem compare`: compares Tandem's speed and choices of tokens with llama.cpp's on a GGUF file.

The two systems are timed alternately.
"""

import argparse
import functools
import json
import os
import sys
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tandem.cli.model_choice import ModelChoice, add_model, find_model, load_tokenizer
from tandem.cli.progress import waiting
from tandem.core.config import add_flags, from_flags, option, require_range
from tandem.core.errors import ConfigError, TandemError
from tandem.core.units import format_bytes

if TYPE_CHECKING:
    from tandem.bench.peers.comparison import Comparison
    from tandem.bench.peers.finding import Peer
    from tandem.bench.peers.setting import Choice, Setting, Speeds
    from tandem.bench.peers.turns import Maker, Rounds

# Each system keeps the weights in its own layouts, and needs working memory.
_MEMORY_OVER_FILE = 2.3
_LIBRARY = "llama.cpp's library"
_NO_LIBRARY = (
    "First choices were not compared: that takes the package llama-cpp-python "
    "(pip install llama-cpp-python)."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class CompareOptions:
    """Options of `tandem compare`."""

    peer: str = "llama.cpp"
    """The system to compare Tandem with; the flag is --with."""
    threads: int | None = option(
        None, help="CPU threads of both (default: one for each fast core)", metavar="N"
    )
    prompt: int = option(512, help="tokens of the timed prompt", metavar="N")
    gen: int = option(32, help="tokens generated after it", metavar="N")
    depth: int = option(0, help="tokens in the KV cache before the prompt", metavar="N")
    rounds: int = option(
        3, help="rounds of alternating measurements; the medians count", metavar="N"
    )
    tokens: int = option(
        256,
        help="tokens of text over which most likely next tokens are compared (0: skip this)",
        metavar="N",
    )
    repacking: bool = option(True, help="let llama.cpp repack weights into its own layouts")
    json: bool = option(False, help="print one JSON object on the last line of standard output")
    quiet: bool = option(False, help="print only the result, warnings and errors", short="-q")

    def __post_init__(self) -> None:
        """Check the ranges."""
        values = asdict(self)
        for name in ("prompt", "rounds"):
            require_range(name, values[name], 1, what="a number")
        require_range("gen", self.gen, 4, what="a number of tokens")  # two of them are warm-up
        for name in ("depth", "tokens"):
            require_range(name, values[name], 0, what="a number of tokens")
        if self.threads is not None:
            require_range("threads", self.threads, 1, what="a number")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `tandem compare`."""
    add_model(parser, is_required=True, help="GGUF file, or hub id of one (OWNER/NAME:Q4_K_M)")
    parser.add_argument(
        "--with", dest="peer", metavar="llama.cpp|PROGRAM",
        help="what Tandem is compared with: llama.cpp (found in PATH, or as llama-cpp-python), or "
        "a program with llama-bench's options and its arguments (default: llama.cpp)",
    )  # fmt: skip
    add_flags(parser, CompareOptions)


def run(flags: argparse.Namespace) -> int:
    """Compare and print the results; returns the exit code."""
    from tandem.bench.peers.finding import find_peer
    from tandem.bench.peers.setting import Setting
    from tandem.kernels.cpu import detect_cpu
    from tandem.kernels.engine import choose_isa

    options = from_flags(CompareOptions, flags)
    peer = find_peer(options.peer)
    found = find_model(from_flags(ModelChoice, flags), quiet=options.quiet)
    file = Path(found.model)
    if file.suffix != ".gguf":
        raise ConfigError(f"{file.name} is not a GGUF file, which llama.cpp and Tandem both read")
    cpu = detect_cpu()
    setting = Setting(
        gguf=file, threads=options.threads or cpu.num_threads, prompt=options.prompt,
        steps=options.gen, may_repack=options.repacking,
        isa=choose_isa(os.environ.get("TANDEM_ISA", "")),
    )  # fmt: skip
    machine = f"{cpu.model_name}, {setting.threads} threads, {setting.isa}"
    ids = _text_ids(found, options.tokens)
    os.environ.setdefault("TQDM_DISABLE", "1")  # inherited by the processes of the systems
    comparison = _compare(setting, peer, options, machine, ids)
    print("\n".join([*comparison.rows, "", comparison.paragraph]))
    if options.json:
        print(json.dumps(comparison.json()))
    return 0


def _text_ids(found: ModelChoice, count: int) -> list[int]:
    """Return at most `count` token ids of held-out text; arbitrary ids without a tokenizer."""
    from tandem.quality.texts import held_out_texts

    if count == 0:
        return []
    try:
        tokenizer = load_tokenizer(found)
    except TandemError:  # without a tokenizer any token ids will do
        return list(range(300, 300 + count))
    text = "\n".join(held_out_texts().values())
    ids: list[int] = tokenizer(text[: 20 * count])["input_ids"]
    return ids[:count]


def _compare(
    setting: "Setting", peer: "Peer", options: CompareOptions, machine: str, ids: list[int]
) -> "Comparison":
    from tandem.bench.peers.comparison import TANDEM, Comparison, agreement
    from tandem.bench.peers.llama_bench import LlamaBench
    from tandem.bench.peers.turns import measured, standing_still
    from tandem.cli.version import version_lines

    ours, library = _makers()
    theirs: Maker = functools.partial(LlamaBench, [*peer.command, "-ngl", "0"])
    theirs = theirs if peer.command else library
    groups: list[dict[str, Maker]] = [{TANDEM: ours, peer.name: theirs}]
    if not peer.command and _is_narrow(setting, quiet=options.quiet):
        groups = [{TANDEM: ours}, {peer.name: theirs}]
    if peer.command and peer.has_library and ids:
        groups.append({_LIBRARY: library})  # only asked for its choices, not timed
    choosers = {TANDEM, _LIBRARY if peer.command else peer.name} if peer.has_library else set()
    tell = _silent if options.quiet else _ProgressPrinter(options.rounds)
    speeds: dict[str, Rounds] = {}
    chosen: list[list[Choice]] = []
    memory: dict[str, int] = {}
    try:
        for group in groups:
            with ExitStack() as stack:
                with waiting(f"loading {' and '.join(group)}", quiet=options.quiet):
                    turns = stack.enter_context(standing_still(group, setting))
                names = [name for name in group if name != _LIBRARY]
                speeds |= measured(turns, names, [options.depth], options.rounds, tell)
                memory |= {name: 0 if peer.command else turns.peak_bytes(name) for name in names}
                chosen += [turns.choices(name, ids) for name in group if ids and name in choosers]
    except OSError as error:
        raise ConfigError(f"the comparison stopped: {error}") from error
    return Comparison(
        file=setting.gguf.name, machine=machine,
        versions={TANDEM: version_lines(is_verbose=False)[0], peer.name: peer.name},
        prompt=options.prompt, steps=options.gen, rounds=options.rounds, speeds=speeds,
        memory=memory, agreement=agreement(*chosen) if chosen else None,
        why_not_agreed=_NO_LIBRARY if ids else "",
    )  # fmt: skip


def _makers() -> "tuple[Maker, Maker]":
    """Return functions that start Tandem and llama.cpp's library, both on the CPU alone."""
    from tandem.bench.peers.llama_cpp import LlamaCpp
    from tandem.bench.peers.tandem_model import Tandem

    return Tandem, functools.partial(LlamaCpp, gpu_layers=0)


def _is_narrow(setting: "Setting", *, quiet: bool) -> bool:
    """Tell whether memory cannot hold both systems, so that they must be measured separately."""
    from tandem.experts.store.host_memory import available_bytes

    needed = int(_MEMORY_OVER_FILE * setting.gguf.stat().st_size)
    if needed <= available_bytes():
        return False
    if not quiet:
        _say(f"one after the other: both together need about {format_bytes(needed)}")
    return True


class _ProgressPrinter:
    """Prints the speeds of each measurement on standard error when the measurement ends."""

    def __init__(self, rounds: int) -> None:
        self._rounds = rounds
        self._done: dict[str, int] = {}

    def __call__(self, name: str, depth: int, speeds: "Speeds") -> None:
        from tandem.bench.peers.turns import line

        self._done[name] = self._done.get(name, 0) + 1
        _say(f"round {self._done[name]} of {self._rounds}, {name}: {line(speeds)}")


def _silent(name: str, depth: int, speeds: "Speeds") -> None:
    """Print nothing."""


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
