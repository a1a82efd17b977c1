"""The file of `tandem datapoint`: one machine as JSON, and its line in a table.

The file holds doctor's findings, a forecast with its measurement, and the hardware profile, which
`tandem plan --profile` reads.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from tandem.core.errors import FileFormatError
from tandem.forecast.report.record import Record, write_whole
from tandem.hardware.profiles import DATAPOINT, DATAPOINT_FORMAT, load_profile
from tandem.policy.cost import HardwareProfile

# Each file begins with it; `require_writable` overwrites only such files.
FIRST_LINE = f'{{"{DATAPOINT}": {DATAPOINT_FORMAT},'
HOLDS = (
    "versions of Tandem, Python, the system's kernel, torch and Transformers",
    "what tandem doctor finds: processor, memory, GPU and driver, and what is slow or missing",
    "what experts cost here by tokens, with the memory's size: a hardware profile",
    "one forecast of tandem plan and what was measured, and how busy other programs were",
)


def write_datapoint(path: Path, record: Record, seconds: float) -> None:
    """Write the anonymous record atomically; raises `ConfigError` if the file cannot be written.

    `seconds` is how long the measurements took.
    """
    record = record.anonymous()
    profiles = [one.said.profile for one in record.speeds if one.said.profile is not None]
    speeds = [asdict(one) for one in record.speeds]
    for one in speeds:
        del one["said"]["profile"]
    text = {
        DATAPOINT: DATAPOINT_FORMAT,
        "versions": record.versions,
        "seconds": round(seconds, 1),
        "findings": [asdict(finding) for finding in record.findings],
        "speeds": speeds,
        "profile": asdict(_named(profiles[0])) if profiles else None,
    }
    written = json.dumps(text, indent=1).replace("{\n ", "{", 1)
    write_whole(path, written + "\n")


def _named(profile: HardwareProfile) -> HardwareProfile:
    """Return a profile named after its CPU and thread count, which identifies no machine."""
    return replace(
        profile, name=f"{profile.cpu}, {profile.cpu_threads} threads", source="tandem datapoint"
    )


@dataclass(frozen=True, slots=True)
class Row:
    """A row of the table of datapoints: one forecast on one machine, beside its measurement."""

    machine: str
    what: str
    forecast: tuple[float, float]
    """Tokens per second of prefill and of decode."""
    measured: tuple[float, float]
    version: str

    @property
    def line(self) -> str:
        """The row as a line of a Markdown table."""
        pairs = zip(self.forecast, self.measured, strict=True)
        cells = [
            f"{predicted:.1f}, {found:.1f} ({predicted / found - 1:+.0%})"
            for predicted, found in pairs
        ]
        return f"| {self.machine} | {self.what} | {' | '.join(cells)} | {self.version} |"


HEAD = (
    "| machine | what | prompt tok/s: forecast, measured | answer tok/s: forecast, measured "
    "| version |",
    "|---|---|---|---|---|",
)


def read_rows(path: Path) -> list[Row]:
    """Return a row for each comparison that a datapoint file has.

    Raises `FileFormatError` if the file is not a datapoint.
    """
    try:
        found: Mapping[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        speeds = [one for one in found["speeds"] if one["state"] == "ok"]
        profile = load_profile(str(path)) if speeds else None
        return [
            Row(
                _machine(profile.cpu, profile.gpu, profile.cpu_threads), one["name"],
                _speeds(one, "forecast"), _speeds(one, "measured"), found["versions"][0],
            )
            for one in speeds if profile is not None
        ]  # fmt: skip
    except (ValueError, KeyError, TypeError, IndexError) as error:
        raise FileFormatError(f"{path}: no datapoint ({type(error).__name__}: {error})") from error


def _machine(cpu: str, gpu: str, threads: int) -> str:
    return f"{cpu}, {threads} threads{'' if gpu == 'emulated' else f', {gpu}'}"


def _speeds(one: Mapping[str, Any], kind: str) -> tuple[float, float]:
    numbers = one["said"]["numbers"]
    return float(numbers[f"{kind}_prompt"]), float(numbers[f"{kind}_decode"])
