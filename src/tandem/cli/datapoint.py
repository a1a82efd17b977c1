"""`tandem datapoint`: writes an anonymous file about this machine; nothing is sent."""

import argparse
import json
import time
from dataclasses import dataclass
from pathlib import Path

from tandem.cli.doctor import has_gpu, looked_at, tried
from tandem.cli.model_choice import import_transformers
from tandem.core.config import add_flags, from_flags, option
from tandem.core.errors import ConfigError

_FILE = "datapoint.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class DatapointOptions:
    """Options of `tandem datapoint`."""

    json: bool = option(False, help="print one JSON object on the last line of standard output")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `tandem datapoint`."""
    parser.add_argument(
        "file", nargs="?", default=_FILE, metavar="FILE.json",
        help=f"file to write (default: {_FILE})",
    )  # fmt: skip
    add_flags(parser, DatapointOptions)


def run(flags: argparse.Namespace) -> int:
    """Announce what the file will hold, measure, and write it; returns the exit code."""
    options = from_flags(DatapointOptions, flags)
    path = Path(flags.file)
    from tandem.forecast.report.datapoint import FIRST_LINE, HOLDS
    from tandem.forecast.report.record import require_writable

    if path.suffix != ".json":
        raise ConfigError(f"{path} does not end in .json, which tandem plan --profile requires")
    require_writable(path, FIRST_LINE, "datapoint")
    print(f"{path} will hold:")
    print("\n".join(f"- {one}" for one in HOLDS))
    print(
        "It names no user, host or network; directories are replaced by ~, HERE or TEMP. Nothing "
        "is sent.\n",
        flush=True,
    )
    begin = time.perf_counter()
    import_transformers(quiet=False, has_bars=False)

    from tandem.cli.version import version_lines
    from tandem.forecast.report.datapoint import write_datapoint
    from tandem.forecast.report.record import Record
    from tandem.forecast.report.speed_stages import CPU_DATAPOINT_STAGES, GPU_DATAPOINT_STAGES

    findings = list(looked_at())
    speeds = tried(GPU_DATAPOINT_STAGES if has_gpu() else CPU_DATAPOINT_STAGES)
    seconds = time.perf_counter() - begin
    record = Record(versions=version_lines(), findings=findings, speeds=speeds)
    write_datapoint(path, record, seconds)
    print(
        f"\nwrote {path} in {seconds:.0f} s. Read it; docs/datapoints says how to share it. "
        f"`tandem plan MODEL --profile {path}` plans for this machine elsewhere"
    )
    if options.json:
        print(json.dumps({"file": str(path), "seconds": seconds}))
    return 0 if all(one.state == "ok" for one in speeds) else 1
