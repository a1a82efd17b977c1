"""Install Tandem, editable, with an extra into the environment of the Python that runs this.

    .venv/bin/python wheels/develop.py EXTRA TORCH [CMAKE_NAME=VALUE ...]

The native part is compiled while pip installs what it does not need: torch, in the words that pip
takes (`torch==2.13.0`, or with `--index-url URL`), and the packages that Tandem and EXTRA name.
Compiled files stay in build/, so that the next call compiles only what has changed.
"""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

PROJECT = tomllib.loads(Path("pyproject.toml").read_text(encoding="utf-8"))
EXTRAS = PROJECT["project"]["optional-dependencies"]
COMPILE = (
    "import sys; from scikit_build_core.build import build_editable;"
    "build_editable(sys.argv[1], dict(a.split('=', 1) for a in sys.argv[2:]))"
)


def requirements(extra: str) -> list[str]:
    """What `extra` names, the extras among it replaced by what they name."""
    found = []
    for requirement in EXTRAS[extra]:
        if requirement.startswith("tandem-moe["):
            for name in requirement[len("tandem-moe[") : -1].split(","):
                found += requirements(name)
        else:
            found.append(requirement)
    return found


def pip(*arguments: str) -> None:
    """Install by pip, which says itself what it could not do."""
    command = [sys.executable, "-m", "pip", "install", "--disable-pip-version-check", "-q"]
    if code := subprocess.run([*command, *arguments]).returncode:
        sys.exit(code)


def has_torch() -> bool:
    """Whether a torch is there already: a GPU's build is not replaced."""
    found = subprocess.run([sys.executable, "-c", "import torch"], capture_output=True)
    return found.returncode == 0


def compiling(folder: str, settings: list[str]) -> subprocess.Popen[bytes]:
    """The process that compiles the native part into build/; `folder`/output has what it says."""
    tools = [tool for tool in ("cmake", "ninja") if shutil.which(tool) is None]
    pip(*PROJECT["build-system"]["requires"], *tools)
    with open(f"{folder}/output", "wb") as output:
        command = [sys.executable, "-c", COMPILE, folder, *settings]
        return subprocess.Popen(command, stdout=output, stderr=output, start_new_session=True)


def main(extra: str, torch: str, *defines: str) -> None:
    """Do all of it; ends with pip's or the compiler's words if they fail."""
    settings = [f"cmake.define.{define}" for define in defines]
    with tempfile.TemporaryDirectory() as folder:
        native = compiling(folder, settings)
        try:
            if not has_torch():
                pip(*torch.split())
            pip(*PROJECT["project"]["dependencies"], *requirements(extra))
            code = native.wait()
        finally:
            if native.poll() is None:
                os.killpg(native.pid, signal.SIGTERM)
        if code:
            sys.exit(Path(folder, "output").read_text(encoding="utf-8", errors="replace"))
    options = [word for setting in settings for word in ("--config-settings", setting)]
    pip("--no-build-isolation", "--no-deps", "-e", ".", *options)


if __name__ == "__main__":
    main(*sys.argv[1:])
