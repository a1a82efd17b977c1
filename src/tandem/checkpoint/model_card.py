"""Writes a packed model's card for a hub: origin, formats, measured quality and speed."""

import json
import re
import shutil
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tandem.checkpoint.json_files import JsonObject, read_json
from tandem.core.errors import ConfigError
from tandem.core.units import format_bytes

CARD_FILE = "README.md"
_FRONT_MATTER = re.compile(r"---\n(.*?)\n---", re.DOTALL)
_LICENCE_FILES = ("LICENSE*", "LICENCE*", "NOTICE*")
_MOST_CARD_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Origin:
    """The base model of a packed model, and its licence."""

    base_model: str | None
    """The base model's id on a hub; None if only a folder is known."""
    licence: str | None
    """The licence in the base model's card; None if the card has no licence."""


def origin_of(directory: Path, name: str) -> Origin:
    """Return the base model and licence of the model in `directory`, each None if unknown.

    `name` is the hub id or path by which the user named the model. A hub id is the base model. For
    a path, the base model is read from the directory's card. The licence is always read there.
    """
    card = directory / CARD_FILE
    is_card = card.is_file() and card.stat().st_size <= _MOST_CARD_BYTES
    matter = _front_matter(card.read_text("utf-8", "replace")) if is_card else {}
    own = None if Path(name).exists() or "/" not in name else name.partition(":")[0]
    return Origin(own or matter.get("base_model"), matter.get("license"))


def _front_matter(text: str) -> dict[str, str]:
    """Return the single-line values in a card's front matter, by key."""
    found = _FRONT_MATTER.match(text)
    pairs = (line.partition(":") for line in (found[1] if found else "").splitlines())
    values = {key: value.strip().strip("\"'") for key, _, value in pairs if not key.startswith(" ")}
    return {key: value for key, value in values.items() if value}


def copy_licences(source: Path, directory: Path) -> None:
    """Copy the licence files in `source` to `directory`, without replacing existing files.

    Nothing is copied if `source` is a GGUF file.
    """
    for pattern in _LICENCE_FILES if source.is_dir() else ():
        for file in source.glob(pattern):
            if file.is_file() and not (directory / file.name).exists():
                shutil.copyfile(file, directory / file.name)


def read_reports(files: Sequence[str]) -> list[JsonObject]:
    """Return the report in each file's last line, from `tandem quality --json` or `bench --json`.

    Raises `ConfigError` if the last line of a file is not such a report.
    """
    found = []
    for file in map(Path, files):
        try:
            report: Any = json.loads(file.read_text("utf-8").splitlines()[-1])
        except (OSError, ValueError, IndexError):
            report = None
        if not isinstance(report, dict) or not report.keys() & {"perplexity", "milliseconds"}:
            raise ConfigError(
                f"--measured: the last line of {file} is not a report; give what tandem quality "
                "--json or tandem bench --json printed"
            )
        found.append(report)
    return found


def write_card(directory: Path, origin: Origin, reports: Sequence[JsonObject]) -> Path:
    """Write the card of a packed model to its directory; return the card's path."""
    file = directory / CARD_FILE
    file.write_text("\n".join(_card(directory, origin, reports)) + "\n", encoding="utf-8")
    return file


def _card(directory: Path, origin: Origin, reports: Sequence[JsonObject]) -> Iterator[str]:
    yield "---"
    yield from [f"base_model: {origin.base_model}"] if origin.base_model else []
    yield from [f"license: {origin.licence}"] if origin.licence else []
    yield from ("library_name: tandem-moe", "tags:", "- moe", "- tandem", "---", "")
    from tandem.checkpoint.packed_files import read_metadata  # it imports torch

    base = origin.base_model
    yield f"# {directory.resolve().name}"
    yield ""
    made = f"[{base}](https://huggingface.co/{base})" if base else "a model whose card names no id"
    yield (
        f"Packed by Tandem, for CPU and GPU together, from {made}: "
        f"{format_bytes(int(read_metadata(directory).get('total_size', 0)))} of weights."
    )
    yield f"The licence is that of the base model: {origin.licence or 'see there'}."
    yield from ("", "    tandem run ORG/NAME      # this repository's id", "")
    yield "`SHA256SUMS` has the sums of all files; `tandem run` compares a download with them."
    yield from ("", "## Recipe", "", "| part | format | layers |", "|---|---|---|")
    yield from _recipe(read_json(directory, "config.json").get("quantization_config") or {})
    yield from _measured(reports)


def _recipe(stored: Mapping[str, Any]) -> Iterator[str]:
    """Yield the lines of the recipe's Markdown table: how many layers have each format."""
    for part, names, otherwise in (
        ("experts", stored.get("expert_formats"), stored.get("expert_dtype")),
        (
            "linear layers",
            (stored.get("dense_formats") or {}).values(),
            stored.get("dense_dtype") or "none",
        ),
    ):
        for name, count in sorted(Counter(map(str, names or ())).items()):
            yield f"| {part} | {name} | {count} |"
        if not names:
            yield f"| {part} | {'as they are' if otherwise == 'none' else otherwise} | all |"


def _measured(reports: Sequence[JsonObject]) -> Iterator[str]:
    """Yield the lines of the section on measurements: results, or the commands that measure."""
    yield from ("", "## Measured", "")
    for report in reports:
        if "perplexity" in report:
            yield f"- Losses, {_losses(report)}"
        else:
            yield (
                f"- Speed on {report.get('processor', 'one machine')}, batch {report['batch']}: "
                f"prefill {report['prefill_tokens_per_second']:.0f} tok/s, decode "
                f"{report['decode_tokens_per_second']:.1f} tok/s (`tandem bench`)"
            )
    if not reports:
        yield "Neither losses nor speed: `tandem quality` and `tandem bench` measure them."


def _losses(report: JsonObject) -> str:
    tokens, perplexity = report["tokens"], f"perplexity {report['perplexity']:.3f}"
    if "kl_mean" not in report:
        return f"on {tokens} tokens: {perplexity} (`tandem quality`)"
    return (
        f"on {tokens} tokens against {Path(str(report['against'])).name}: KL divergence "
        f"{report['kl_mean']:.5f} nats (99 %: {report['kl_p99']:.4f}), same first choice "
        f"{report['same_first_choice']:.2%}, {perplexity}, the reference's "
        f"{report['reference_perplexity']:.3f} (`tandem quality`)"
    )
