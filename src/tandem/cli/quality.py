"""`tandem quality`: compares a model's answers with a reference's, on text of several domains.

The reference runs first and writes its logits to a file, then the model runs: memory never holds
both.
"""

import argparse
import contextlib
import dataclasses
import functools
import gc
import json
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from tandem.cli.keeping import Keeper, KeepOptions, cache_dir
from tandem.cli.model_choice import (
    DENSE_DTYPE_HELP,
    ModelChoice,
    add_model,
    find_model,
    import_transformers,
    load_model_and_tokenizer,
    load_tokenizer,
    progress_bar,
)
from tandem.core.config import add_flags, from_flags, option, require_range
from tandem.core.errors import ConfigError
from tandem.devices.options import OffloadOptions, offload_options

if TYPE_CHECKING:
    from tandem.quality.comparison import Quality, Tally
    from tandem.quality.kept_logits import KeptLogits, LogitsWriter
    from tandem.quality.texts import Window

_TOKENS = 4096
_OTHER_WORDS = "tokenize the text differently; compare models with the same vocabulary"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class QualityOptions:
    """Options of `tandem quality`."""

    against: str | None = option(
        None, help="reference: a model, such as the 16-bit checkpoint, or a file written by --keep",
        metavar="REFERENCE",
    )  # fmt: skip
    keep: str | None = option(
        None, help="keep the reference's logits (without --against, MODEL's) in this file",
        metavar="FILE",
    )  # fmt: skip
    tokens: int | None = option(
        None,
        help=f"number of tokens to read, the same from each domain (default: {_TOKENS})",
        metavar="N",
    )
    dense_dtype: str = option("auto", help=DENSE_DTYPE_HELP, metavar="DTYPE")
    kv_dtype: str = option("auto", help="keys and values of MODEL: auto, bf16, int8")
    pack_to_disk: bool | None = option(
        None, help="write a packed copy of a model that does not fit into memory, and run that"
    )
    json: bool = option(False, help="print one JSON object on the last line of standard output")
    quiet: bool = option(False, help="no progress", short="-q")

    def __post_init__(self) -> None:
        """Check the range."""
        if self.tokens is not None:
            require_range("tokens", self.tokens, 16, what="a number of tokens")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `tandem quality`."""
    add_model(parser, loads=True)
    parser.add_argument(
        "--text", action="append", metavar="FILE",
        help="text to read; repeatable, each file is a domain (default: text in "
        "seven languages and code, which comes with Tandem)",
    )  # fmt: skip
    add_flags(parser, QualityOptions)
    add_flags(parser, OffloadOptions)


def run(flags: argparse.Namespace) -> int:
    """Measure and print the report; returns the exit code."""
    options, choice = from_flags(QualityOptions, flags), from_flags(ModelChoice, flags)
    run = _Run(options, choice, offload_options(flags))
    against = Path(options.against) if options.against else None
    is_kept = against is not None and against.is_file() and against.suffix != ".gguf"
    if is_kept and (flags.text or options.tokens or options.keep):
        raise ConfigError(
            f"{against} has its text with it; leave --text, --tokens and --keep out, or give a "
            "model to --against"
        )
    if options.keep and not Path(options.keep).absolute().parent.is_dir():
        raise ConfigError(f"--keep: there is no folder {Path(options.keep).parent}; make it first")
    import_transformers(quiet=options.quiet)
    with contextlib.ExitStack() as stack:
        if against is not None and is_kept:
            kept = run.open_kept(against)
            tally = run.measure(kept.windows, reference=kept)
        elif against is not None:
            path = Path(options.keep or stack.enter_context(_scratch()) / "logits.safetensors")
            windows = run.windows(flags.text or ())
            kept = run.keep_reference(windows, path)
            tally = run.measure(windows, reference=kept)
        else:
            tally = run.measure(run.windows(flags.text or ()), keep=options.keep)
    print(_table(tally))
    if options.json:
        print(json.dumps(_report(tally, options, choice)))
    return 0


class _Run:
    """One measurement, which loads the reference and the model one after the other."""

    def __init__(
        self, options: QualityOptions, choice: ModelChoice, offload: OffloadOptions
    ) -> None:
        self._options, self._choice, self._offload = options, choice, offload
        self._bar = None if options.quiet else progress_bar()

    def windows(self, files: list[str] | tuple[()]) -> "list[Window]":
        """Return windows of the tokenized files, or of the default text if there are none.

        Raises `ConfigError` if the reference tokenizes the text differently.
        """
        from tandem.quality.texts import cut_windows, held_out_texts, read_texts, words_digest

        texts = read_texts(files) if files else held_out_texts()
        choices = [self._choice]
        if self._options.against:
            choices.append(self._reference)
        tokenizers = [load_tokenizer(find_model(c, quiet=self._options.quiet)) for c in choices]
        cut = [cut_windows(texts, t, self._options.tokens or _TOKENS) for t in tokenizers]
        pairs = zip(cut, tokenizers, strict=True)
        if len({words_digest(windows, tokenizer) for windows, tokenizer in pairs}) > 1:
            raise ConfigError(f"{choices[0].model} and {choices[1].model} {_OTHER_WORDS}")
        return cut[0]

    def open_kept(self, path: Path) -> "KeptLogits":
        """Return the logits in a file that --keep wrote, with their text.

        Raises `ConfigError` if the model tokenizes that text differently.
        """
        from tandem.quality.kept_logits import KeptLogits
        from tandem.quality.texts import words_digest

        kept = KeptLogits(path)
        tokenizer = load_tokenizer(find_model(self._choice, quiet=self._options.quiet))
        if words_digest(kept.windows, tokenizer) != kept.words:
            raise ConfigError(f"{self._choice.model} and the model of {path} {_OTHER_WORDS}")
        return kept

    def keep_reference(self, windows: "list[Window]", path: Path) -> "KeptLogits":
        """Run the reference in its own formats, write its logits to `path`, and return them."""
        from tandem.quality.kept_logits import KeptLogits

        offload = dataclasses.replace(self._offload, expert_dtype="auto", expert_memory="auto")
        self._measure(self._reference, offload, "none", windows, "reference", keep=path)
        return KeptLogits(path)

    def measure(
        self,
        windows: "list[Window]",
        *,
        reference: "KeptLogits | None" = None,
        keep: str | None = None,
    ) -> "Tally":
        """Run the model with the requested options; return the results by domain.

        The results compare the model with `reference`, if given. `keep` names a file for the
        model's logits.
        """
        return self._measure(
            self._choice, self._offload, self._options.dense_dtype, windows, "model",
            reference=reference, keep=None if keep is None else Path(keep),
        )  # fmt: skip

    @property
    def _reference(self) -> ModelChoice:
        assert self._options.against is not None
        return dataclasses.replace(self._choice, model=self._options.against, revision=None)

    def _measure(
        self,
        choice: ModelChoice,
        offload: OffloadOptions,
        dense_dtype: str,
        windows: "list[Window]",
        stage: str,
        *,
        reference: "KeptLogits | None" = None,
        keep: Path | None = None,
    ) -> "Tally":
        from tandem.quality.comparison import measure
        from tandem.quality.texts import words_digest

        options = self._options
        keeper = Keeper(
            KeepOptions(keep=False, pack_to_disk=options.pack_to_disk), quiet=options.quiet
        )
        model, tokenizer = load_model_and_tokenizer(
            choice, offload, quiet=options.quiet, dense_dtype=dense_dtype, keeper=keeper
        )
        try:
            with _writing(keep, windows, words_digest(windows, tokenizer)) as writer:
                return measure(
                    model, windows, reference=reference, writer=writer,
                    kv_dtype=options.kv_dtype if stage == "model" else "auto",
                    progress=self._progress(stage),
                )  # fmt: skip
        finally:
            model.close()
            del model
            gc.collect()  # models contain reference cycles

    def _progress(self, stage: str) -> "Callable[[int, int], None] | None":
        return None if self._bar is None else functools.partial(self._bar, f"tokens of the {stage}")


@contextlib.contextmanager
def _writing(
    path: Path | None, windows: "list[Window]", words: str
) -> "Iterator[LogitsWriter | None]":
    from tandem.quality.kept_logits import LogitsWriter

    if path is None:
        yield None
        return
    with LogitsWriter(path, windows, words) as writer:
        yield writer


@contextlib.contextmanager
def _scratch() -> Iterator[Path]:
    """Make a temporary directory in Tandem's cache directory, as logits may take gigabytes."""
    cache_dir().mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache_dir(), prefix="quality-") as name:
        yield Path(name)


def _report(tally: "Tally", options: QualityOptions, choice: ModelChoice) -> dict[str, object]:
    return {
        "model": choice.model,
        "against": options.against,
        **_numbers(tally.total()),
        "domains": {domain: _numbers(found) for domain, found in tally.by_domain().items()},
    }


def _numbers(found: "Quality") -> dict[str, float]:
    return {name: value for name, value in dataclasses.asdict(found).items() if value is not None}


def _table(tally: "Tally") -> str:
    rows = [*tally.by_domain().items(), ("all", tally.total())]
    width = max(len(name) for name, _ in rows)
    if tally.total().kl_mean is None:
        lines = [f"{'':{width}}  tokens  perplexity"]
        return "\n".join(
            lines + [f"{name:{width}}  {q.tokens:6}  {q.perplexity:10.3f}" for name, q in rows]
        )
    lines = [f"{'':{width}}  tokens   KL mean    KL 99 %  same first  perplexity  reference's"]
    for name, q in rows:
        lines.append(
            f"{name:{width}}  {q.tokens:6}  {q.kl_mean:8.5f}  {q.kl_p99:9.4f}  "
            f"{q.same_first_choice:10.2%}  {q.perplexity:10.3f}  {q.reference_perplexity:11.3f}"
        )
    return "\n".join(lines)
