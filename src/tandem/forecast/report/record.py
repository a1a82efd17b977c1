"""The findings and measurements of a machine, without private data, and functions to write them.

The files are meant to be published, so names of the host, its user and their directories are
replaced.
"""

import getpass
import os
import re
import socket
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tandem.core.errors import ConfigError
from tandem.forecast.report.stages import Outcome
from tandem.forecast.windows_check import Finding

_LEAST_NAME = 3  # characters; a shorter user name also occurs within words


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """The findings that `tandem doctor --report` and `tandem datapoint` write about a machine."""

    versions: Sequence[str]
    findings: Sequence[Finding]
    speeds: Sequence[Outcome]
    """Forecasts beside measurements."""
    smoke: Sequence[Outcome] = ()
    """Features that were tried, and whether they work."""

    def anonymous(self) -> "Record":
        """Return the record with local directories and the names of host and user replaced."""
        return Record(
            versions=[without_private_data(version) for version in self.versions],
            findings=[_finding_without_names(finding) for finding in self.findings],
            speeds=[_outcome_without_names(outcome) for outcome in self.speeds],
            smoke=[_outcome_without_names(outcome) for outcome in self.smoke],
        )


def require_writable(path: Path, first_line: str, kind: str) -> None:
    """Raise `ConfigError` if a file cannot be written, or exists and is of another type.

    An existing file may be overwritten if it begins with `first_line`. `kind` names such files in
    the message.
    """
    if not path.parent.is_dir():
        raise ConfigError(f"{path.parent} is not a directory; make it, or name another file")
    if path.is_dir():
        raise ConfigError(f"{path} is a directory; name a file in it")
    if path.exists() and not _begins_with(path, first_line):
        raise ConfigError(f"{path} exists already and is not a {kind}; name another file")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ConfigError(f"{path} cannot be written; name a file in a directory of yours")


def write_whole(path: Path, text: str) -> None:
    """Write a file atomically; raises `ConfigError` if the file cannot be written."""
    try:
        with tempfile.NamedTemporaryFile(
            "w", encoding="utf-8", dir=path.parent, prefix=f".{path.name}.", delete=False
        ) as file:
            file.write(text)
        os.replace(file.name, path)
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}") from error


def without_private_data(text: str) -> str:
    """Return a text with local directories and the names of host and user replaced."""
    for path, name in _places():
        text = text.replace(path, name)
    for word, name in ((socket.gethostname(), "HOST"), (_user(), "USER")):
        if len(word) >= _LEAST_NAME:
            text = re.sub(rf"\b{re.escape(word)}\b", name, text)
    return text


def _begins_with(path: Path, first_line: str) -> bool:
    try:
        with path.open(encoding="utf-8") as file:
            return file.readline().strip() == first_line
    except (OSError, UnicodeDecodeError):
        return False


def _finding_without_names(finding: Finding) -> Finding:
    found, remedy = without_private_data(finding.found), without_private_data(finding.remedy)
    return replace(finding, found=found, remedy=remedy)


def _outcome_without_names(outcome: Outcome) -> Outcome:
    result = replace(outcome.said, text=without_private_data(outcome.said.text))
    return replace(outcome, said=result, details=without_private_data(outcome.details))


def _places() -> list[tuple[str, str]]:
    """Return (directory, its replacement) for each local directory, the longest path first."""
    package = Path(__file__).parents[2]
    named = {
        package: "tandem", Path(sys.prefix): "PYTHON", Path(sys.base_prefix): "PYTHON",
        Path(tempfile.gettempdir()): "TEMP", Path.cwd(): "HERE", Path.home(): "~",
    }  # fmt: skip
    for name in ("TANDEM_CACHE", "XDG_CACHE_HOME"):
        if chosen := os.environ.get(name):
            named[Path(chosen).expanduser().absolute()] = name
    places = [(str(path), name) for path, name in named.items() if path != Path(path.anchor)]
    return sorted(places, key=lambda place: -len(place[0]))


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a user without a name, as in containers
        return ""
