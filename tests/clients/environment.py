"""Creates a client's environment and runs the client's script in it.

A script names its dependencies as inline script metadata (PEP 723): a TOML comment between `# ///
script` and `# ///`. `dependencies` are installed in order, each by its own pip if `in_turns` is
set. With `above_tandem` the environment also sees the packages of the current one.
"""

import json
import os
import re
import subprocess
import sys
import sysconfig
import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.clients.trying import Served

_HERE = Path(__file__).parent
_REPOSITORY = _HERE.parents[1]
_ENVIRONMENTS = _REPOSITORY / "build" / "clients"
_PATIENCE_SECONDS = 600
_METADATA = re.compile(r"^# /// script\n((?:#.*\n)+?)# ///$", re.MULTILINE)
# These variables allow access to the package index, and so the clients' start.
_KEPT_VARIABLES = ("PATH", "LANG", "SSL_CERT_FILE", "REQUESTS_CA_BUNDLE")
# Requests may go to this server only.
_OFFLINE = {
    "HF_HUB_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "OMP_NUM_THREADS": "1",
    "GOMP_SPINCOUNT": "1000",
}


@dataclass
class Report:
    """The result of trying one client."""

    client: str
    version: str = "-"
    tries: list[dict[str, Any]] = field(default_factory=list)
    problem: str = ""
    """Why nothing more was tried."""

    @property
    def works(self) -> bool:
        """Whether everything that was tried works."""
        return not self.problem and all(one["works"] for one in self.tries)

    @property
    def tried(self) -> str:
        """The names of what was tried."""
        return ", ".join(one["tried"] for one in self.tries) or "-"

    @property
    def result(self) -> str:
        """The result in a word or two."""
        if self.works:
            return "works"
        if not any(one["works"] for one in self.tries):
            return "fails" if self.tries else "not tried"
        return "fails: " + ", ".join(one["tried"] for one in self.tries if not one["works"])

    @property
    def note(self) -> str:
        """A remark on the result."""
        notes = [f"{one['tried']}: {one['note']}" for one in self.tries if one["note"]]
        return "; ".join([*notes, self.problem] if self.problem else notes)

    def __str__(self) -> str:
        """The report in one line."""
        line = f"{self.client} {self.version}: {self.tried}: {self.result}"
        return f"{line} ({self.note})" if self.note else line


def client_names() -> list[str]:
    """Return the names of the clients that have a script."""
    scripts = _HERE.glob("*.py")
    return sorted(p.stem for p in scripts if _METADATA.search(p.read_text(encoding="utf-8")))


def try_client(name: str, served: Served) -> Report:
    """Install a client if needed, run its script on a server, and return its report."""
    report = Report(name)
    try:
        python = _environment(name)
    except subprocess.CalledProcessError as error:
        report.problem = f"could not be installed: {_last_line(error.stderr)}"
        return report
    log = _ENVIRONMENTS / name / "log.txt"
    script = f"tests.clients.{name}"
    command = [str(python), "-m", script, served.address, served.name, str(served.directory)]
    with log.open("w", encoding="utf-8") as file:
        try:
            code = subprocess.run(
                command, cwd=_REPOSITORY, env=_variables(name), stdout=file,
                stderr=subprocess.STDOUT, timeout=_PATIENCE_SECONDS, check=False,
            ).returncode  # fmt: skip
        except subprocess.TimeoutExpired:
            code = 0
            report.problem = f"was stopped after {_PATIENCE_SECONDS} s"
    _read(report, log.read_text(encoding="utf-8", errors="replace"))
    if code != 0:
        report.problem = f"ended with {code}; see {log.relative_to(_REPOSITORY)}"
    return report


def _read(report: Report, log: str) -> None:
    for line in log.splitlines():
        if line.startswith("REPORT "):
            report_line = json.loads(line.removeprefix("REPORT "))
            if "version" in report_line:
                report.version = report_line["version"]
            else:
                report.tries.append(report_line)


def _environment(name: str) -> Path:
    """Return the Python of a client's environment; recreate it if its dependencies have changed."""
    needs = _needs(name)
    home = _ENVIRONMENTS / name
    python, stamp = home / "bin" / "python", home / "installed.json"
    if stamp.exists() and json.loads(stamp.read_text(encoding="utf-8")) == needs:
        return python
    print(f"installing {name}", file=sys.stderr, flush=True)
    _quietly([sys.executable, "-m", "venv", "--clear", home])
    if needs.get("above_tandem"):
        _lay_above_tandem(home)
    dependencies = needs["dependencies"]
    for group in [[d] for d in dependencies] if needs.get("in_turns") else [dependencies]:
        _quietly([python, "-m", "pip", "install", "-q", *group])
    stamp.write_text(json.dumps(needs), encoding="utf-8")
    return python


def _needs(name: str) -> dict[str, Any]:
    found = _METADATA.search((_HERE / f"{name}.py").read_text(encoding="utf-8"))
    assert found, f"{name}.py has no inline script metadata"
    text = re.sub(r"^# ?", "", found[1], flags=re.MULTILINE)
    metadata = tomllib.loads(text)
    return {"dependencies": metadata["dependencies"], **metadata.get("tool", {}).get("tandem", {})}


def _lay_above_tandem(home: Path) -> None:
    """Make Tandem, torch and Transformers of this environment visible in the client's."""
    below = sysconfig.get_path("purelib")
    variables = {"base": str(home), "platbase": str(home)}
    above = Path(sysconfig.get_path("purelib", "venv", vars=variables))
    (above / "below.pth").write_text(f"import site; site.addsitedir({below!r})\n", encoding="utf-8")


def _variables(name: str) -> dict[str, str]:
    """Return a client's environment variables: no API key, no proxy, its own home directory."""
    home = _ENVIRONMENTS / name / "home"
    home.mkdir(exist_ok=True)
    kept = {key: os.environ[key] for key in _KEPT_VARIABLES if key in os.environ}
    return {**kept, **_OFFLINE, "HOME": str(home), "OPENAI_API_KEY": "none"}


def _quietly(command: list[Any]) -> None:
    subprocess.run(command, capture_output=True, text=True, check=True)


def _last_line(text: str) -> str:
    lines = [line for line in text.splitlines() if line.strip()]
    return lines[-1][:300] if lines else "no reason given"
