"""Tests of the Dockerfile: its lines are valid shell, and its files exist."""

import re
import subprocess
import tomllib
from fnmatch import fnmatch

import pytest

from tests.test_wheels import ROOT

TEXT = (ROOT / "Dockerfile").read_text().replace("\\\n", " ")
RUNS = [line.removeprefix("RUN ") for line in TEXT.splitlines() if line.startswith("RUN ")]


@pytest.mark.parametrize("line", RUNS)
def test_each_line_is_a_shells(line: str) -> None:
    assert not subprocess.run(["sh", "-n", "-c", line], check=False).returncode


def test_versions_and_extras_are_the_projects() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (torch,) = set(re.findall(r"torch==[\d.]+", TEXT))
    assert f"TORCH ?= {torch}\n" in (ROOT / "Makefile").read_text()
    (extras,) = re.findall(r"tandem-moe\[(.*?)\]", TEXT)
    assert set(extras.split(",")) <= project["optional-dependencies"].keys()
    (python,) = re.findall(r"ARG PYTHON=(.*)", TEXT)
    assert f"Programming Language :: Python :: {python}" in project["classifiers"]


def test_the_image_gets_what_a_wheel_is_built_of() -> None:
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    needed = ("wheels/build.sh", "csrc", "src", "CMakeLists.txt", "pyproject.toml", "README.md")
    assert "wheels/build.sh /wheels python3" in TEXT
    for name in (*needed, "LICENSE"):
        assert (ROOT / name).exists()
        assert not any(fnmatch(name.partition("/")[0], pattern) for pattern in ignored)
