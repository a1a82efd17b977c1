"""The file that `tandem doctor --report` writes: Markdown for people, JSON at its end for programs.

It goes into public issues, so names of this machine, its user and their directories are replaced.
"""

import getpass
import json
import os
import re
import socket
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path

from tandem.core.errors import ConfigError
from tandem.forecast.report.stages import Outcome
from tandem.forecast.windows_check import Finding

FIRST_LINE = "# Report of `tandem doctor`"
_LEAST_NAME = 3  # characters: a shorter name of a user is also part of words


def require_writable(path: Path) -> None:
    """Refuse a file that cannot be written, or that something else has written; `ConfigError`."""
    if not path.parent.is_dir():
        raise ConfigError(f"{path.parent} is no directory; make it, or name another file")
    if path.is_dir():
        raise ConfigError(f"{path} is a directory; name a file in it")
    if path.exists() and not _is_report(path):
        raise ConfigError(f"{path} is there already and is no report; name another file")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ConfigError(f"{path} cannot be written; name a file in a directory of yours")


def _is_report(path: Path) -> bool:
    try:
        with path.open(encoding="utf-8") as file:
            return file.readline().strip() == FIRST_LINE
    except (OSError, UnicodeDecodeError):
        return False


def write_report(
    path: Path,
    versions: Sequence[str],
    findings: Sequence[Finding],
    smoke: Sequence[Outcome],
    speeds: Sequence[Outcome],
) -> None:
    """Write the file at once, or leave it as it was; `ConfigError` if the disk refuses."""
    versions = [without_private_data(version) for version in versions]
    findings = [_finding_without_names(finding) for finding in findings]
    smoke = [_outcome_without_names(outcome) for outcome in smoke]
    speeds = [_outcome_without_names(outcome) for outcome in speeds]
    lines = [FIRST_LINE, "", *(f"- {version}" for version in versions), ""]
    lines += ["## This machine", "", *_findings(findings), ""]
    lines += ["## What works", "", *_outcomes(smoke), ""]
    lines += ["## Forecast and measured", "", *_outcomes(speeds), ""]
    data = {
        "versions": list(versions),
        "findings": [asdict(finding) for finding in findings],
        "smoke": [asdict(outcome) for outcome in smoke],
        "speeds": [asdict(outcome) for outcome in speeds],
    }
    lines += ["<details><summary>The same for programs</summary>", "", "```json"]
    lines += [json.dumps(data), "```", "</details>", ""]
    try:
        with tempfile.NamedTemporaryFile(
            "w", encoding="utf-8", dir=path.parent, prefix=f".{path.name}.", delete=False
        ) as file:
            file.write("\n".join(lines))
        os.replace(file.name, path)
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}") from error


def _finding_without_names(finding: Finding) -> Finding:
    found, remedy = without_private_data(finding.found), without_private_data(finding.remedy)
    return replace(finding, found=found, remedy=remedy)


def _outcome_without_names(outcome: Outcome) -> Outcome:
    said = replace(outcome.said, text=without_private_data(outcome.said.text))
    return replace(outcome, said=said, details=without_private_data(outcome.details))


def _findings(findings: Sequence[Finding]) -> Iterator[str]:
    yield "| what | state | found | what to do |"
    yield "|---|---|---|---|"
    for finding in findings:
        found, remedy = _cell(finding.found), _cell(finding.remedy)
        yield f"| {finding.what} | {finding.state} | {found} | {remedy} |"


def _outcomes(outcomes: Sequence[Outcome]) -> Iterator[str]:
    yield "| what | state | seconds | found |"
    yield "|---|---|---|---|"
    for outcome in outcomes:
        found = _cell(outcome.said.text)
        yield f"| {outcome.name} | {outcome.state} | {outcome.seconds:.1f} | {found} |"
    for outcome in outcomes:
        if outcome.details:
            yield from ("", f"{outcome.name}:", "", "```text", outcome.details, "```")


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def without_private_data(text: str) -> str:
    """Return a text without this machine's directories and the names of host and user."""
    for path, name in _places():
        text = text.replace(path, name)
    for word, name in ((socket.gethostname(), "HOST"), (_user(), "USER")):
        if len(word) >= _LEAST_NAME:
            text = re.sub(rf"\b{re.escape(word)}\b", name, text)
    return text


def _places() -> list[tuple[str, str]]:
    """Return directories and what stands for them, the longest first."""
    package = Path(__file__).parents[2]
    named = {
        package: "tandem", Path(sys.prefix): "PYTHON", Path(sys.base_prefix): "PYTHON",
        Path(tempfile.gettempdir()): "TEMP", Path.cwd(): "HERE", Path.home(): "~",
    }  # fmt: skip
    places = [(str(path), name) for path, name in named.items() if path != Path(path.anchor)]
    return sorted(places, key=lambda place: -len(place[0]))


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a user without a name, as containers have
        return ""
