"""`tandem calibrate`: learns a model's residual vectors, and measures how well they predict."""

import argparse
import json
import sys
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tandem.cli.keeping import cache_dir
from tandem.cli.model_choice import ModelChoice, add_model, load_model_and_tokenizer
from tandem.core.config import add_flags, from_flags, option, require_range
from tandem.core.errors import FileFormatError
from tandem.devices.options import OffloadOptions

if TYPE_CHECKING:
    from tandem.bench.calibration import Calibration


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrateOptions:
    """Options of `tandem calibrate`."""

    text: str | None = option(
        None, help="text to learn from (default: a small sample that comes with Tandem)",
        metavar="FILE",
    )  # fmt: skip
    tokens: int = option(8192, help="maximum number of its tokens to read", metavar="N")
    output: str | None = option(
        None, help="where to write the vectors (default: where Tandem looks for this model's)",
        metavar="FILE",
    )  # fmt: skip
    top: int = option(
        0, help="number of experts that count as predicted (default: top-k)", metavar="K"
    )
    json: bool = option(False, help="print one JSON object on the last line of standard output")

    def __post_init__(self) -> None:
        """Check the ranges."""
        require_range("tokens", self.tokens, 1)
        require_range("top", self.top, 0)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `tandem calibrate`."""
    add_model(parser, loads=True)
    parser.add_argument(
        "--expert-dtype", default="auto", metavar="DTYPE", help="see tandem run --help-all"
    )
    add_flags(parser, CalibrateOptions)


def run(flags: argparse.Namespace) -> int:
    """Calibrate and report; returns the exit code."""
    options = from_flags(CalibrateOptions, flags)
    text = _read(options.text)
    offload = OffloadOptions(expert_dtype=flags.expert_dtype)
    model, tokenizer = load_model_and_tokenizer(from_flags(ModelChoice, flags), offload, quiet=True)

    from tandem.bench.calibration import accuracy_by_batch, calibrate
    from tandem.hf.identity import model_identity
    from tandem.hf.lookahead.look_ahead import calibrated_path

    found = calibrate(model, tokenizer(text)["input_ids"][: options.tokens], _progress)
    print(file=sys.stderr)
    path = Path(options.output) if options.output else calibrated_path(model, cache_dir())
    found.residuals.save(path, model_identity(model))
    top = options.top or found.judged.meta.top_k
    report = _report(found, accuracy_by_batch(found.judged, top), top, path)
    print(_table(report))
    if options.json:
        print(json.dumps(report))
    return 0


def _read(name: str | None) -> str:
    if name is None:
        sample = resources.files("tandem.demo").joinpath("calibration.txt")
        return sample.read_text(encoding="utf-8")
    path = Path(name)
    if not path.is_file():
        found = "a folder" if path.is_dir() else "no such file"
        raise FileFormatError(f"{path}: found {found}; expected a text to learn from")
    return path.read_text(encoding="utf-8", errors="replace")


def _progress(done: int, total: int) -> None:
    print(f"\r{done} of {total} windows", end="", file=sys.stderr, flush=True)


def _report(
    found: "Calibration", accuracy: dict[str, list[float]], top: int, path: Path
) -> dict[str, object]:
    from tandem.bench.calibration import BATCHES

    plain, residual = found.likeness
    return {
        "residuals": str(path),
        "taught_tokens": found.taught_tokens,
        "judged_tokens": found.judged.num_tokens,
        "top": top,
        "batches": list(BATCHES),
        "accuracy": accuracy,
        "cosine": {
            "gate": sum(plain) / len(plain),
            "residual": sum(residual) / len(residual),
            "by_layer": {"gate": plain, "residual": residual},
        },
    }


def _table(report: dict[str, Any]) -> str:
    """Return a table of each predictor's accuracy and cosine, like tables 5 and 8 of DALI."""
    cosine = report["cosine"]
    batches = " ".join(f"{batch:>6}" for batch in report["batches"])
    lines = [
        f"{report['taught_tokens']} tokens taught, {report['judged_tokens']} judged; vectors in "
        f"{report['residuals']}",
        f"top-{report['top']} by workload, batch: {batches}   cosine",
    ]
    for name in ("gate", "residual"):
        values = " ".join(f"{value:6.1%}" for value in report["accuracy"][name])
        lines.append(f"  {name:<26}{values}   {cosine[name]:.3f}")
    return "\n".join(lines)
