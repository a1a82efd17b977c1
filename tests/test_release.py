"""Tests of `make release`: it tags what it checked, uploads nothing, stops with a sentence."""

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.test_wheels import ROOT, commit, error_of, git

# Replaces Python: makes an environment whose tools write empty files and record their calls.
PYTHON = """#!/bin/sh
[ "$2" = venv ] || exit 0
mkdir -p "$3/bin"
for tool in python cyclonedx-py twine; do cp wheels/tool "$3/bin/$tool"; done
"""
TOOL = """#!/bin/sh
echo "$(basename "$0") $*" >>build/calls
case "$*" in
  *--outdir*) echo >build/release/tandem_moe-1.2.3.tar.gz ;;
  *.cdx.json) echo '{}' >build/release/tandem_moe-1.2.3.cdx.json ;;
esac
"""
MAKEFILE = """
wheel:
\t@mkdir -p build/wheels && echo >build/wheels/tandem_moe-1.2.3-cp312-abi3-any.whl
check-wheel:
\t@echo torch==2.13.0 >build/wheels/checked-with.txt
"""


@pytest.fixture
def clone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository that is ready for release 1.2.3, in which building only writes empty files."""
    (tmp_path / "wheels").mkdir()
    for name in ("release.sh", "release_files.sh", "pythons.sh"):
        shutil.copy(ROOT / "wheels" / name, tmp_path / "wheels" / name)
    for name, text in {"tool": TOOL, "python": PYTHON, "install.sh": "#!/bin/sh\n"}.items():
        (tmp_path / "wheels" / name).write_text(text)
        (tmp_path / "wheels" / name).chmod(0o755)
    (tmp_path / "Makefile").write_text(MAKEFILE)
    (tmp_path / ".gitignore").write_text("build/\n")
    (tmp_path / "pyproject.toml").write_text('[project]\nversion = "1.2.3"\n')
    (tmp_path / "CHANGELOG.md").write_text("## Unreleased\n\n## 1.2.3 - 2026-12-01\n")
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", ".")
    commit(tmp_path, "first")
    for name in ("BUILD_PYTHONS", "CHECK_PYTHONS"):
        monkeypatch.setenv(name, str(tmp_path / "wheels/python"))
    for role in ("AUTHOR", "COMMITTER"):
        monkeypatch.setenv(f"GIT_{role}_NAME", "Tandem")
        monkeypatch.setenv(f"GIT_{role}_EMAIL", "tandem@example.org")
    for name in ("GIT_CONFIG_GLOBAL", "GIT_CONFIG_SYSTEM"):
        monkeypatch.setenv(name, os.devnull)
    return tmp_path


def tags(clone: Path) -> str:
    command = ["git", "tag", "--list"]
    return subprocess.run(command, cwd=clone, capture_output=True, text=True, check=True).stdout


def release(clone: Path, version: str = "1.2.3") -> str:
    """Return the error of a refused release; it leaves no tag."""
    before = tags(clone)
    sentence = error_of(str(clone / "wheels/release.sh"), version)
    assert tags(clone) == before
    return sentence


def test_a_release_has_all_its_files_checked_and_a_tag(clone: Path) -> None:
    command = [str(clone / "wheels/release.sh"), "1.2.3"]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert tags(clone) == "v1.2.3\n"
    files = {"tandem_moe-1.2.3-cp312-abi3-any.whl", "tandem_moe-1.2.3.tar.gz",
             "tandem_moe-1.2.3.cdx.json"}  # fmt: skip
    made = clone / "build/release"
    assert {file.name for file in made.iterdir()} == {*files, "SHA256SUMS"}
    sums = (made / "SHA256SUMS").read_text().split()
    assert set(sums[1::2]) == files
    subprocess.run(["sha256sum", "--quiet", "--check", "SHA256SUMS"], cwd=made, check=True)
    assert json.loads((made / "tandem_moe-1.2.3.cdx.json").read_text()) == {}
    assert "Dry run" in printed
    assert {name for name in files if name in printed} == files
    calls = (clone / "build/calls").read_text()
    assert "twine check --strict" in calls
    assert "twine upload" not in calls


def test_a_tree_with_changes_is_not_released(clone: Path) -> None:
    (clone / "new").write_text("")
    assert "not committed" in release(clone)


def test_a_tag_is_not_set_twice(clone: Path) -> None:
    git(clone, "tag", "v1.2.3")
    assert "the tag v1.2.3 exists" in release(clone)


@pytest.mark.parametrize("version", ["", "1.2", "v1.2.3", "1.2.3; ls"])
def test_a_version_is_three_numbers(clone: Path, version: str) -> None:
    assert "make release VERSION=1.2.3" in release(clone, version)


def test_the_version_is_the_projects(clone: Path) -> None:
    assert "pyproject.toml has another version than 1.2.4" in release(clone, "1.2.4")


def test_the_changelog_has_the_version(clone: Path) -> None:
    (clone / "CHANGELOG.md").write_text("## Unreleased\n")
    commit(clone, "unreleased")
    assert "no section '## 1.2.3 - DATE'" in release(clone)


def test_a_python_that_is_not_here_is_named(clone: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CHECK_PYTHONS", "no-such-python")
    assert "no-such-python does not run here" in release(clone)


def test_the_first_commands_of_readme_change_and_change_back(tmp_path: Path) -> None:
    (tmp_path / "wheels").mkdir()
    for name in (
        "README.md",
        "wheels/readme.sh",
        "wheels/readme-clone.md",
        "wheels/readme-index.md",
    ):
        shutil.copy(ROOT / name, tmp_path / name)

    def switch(to: str) -> str:
        subprocess.run([tmp_path / "wheels/readme.sh", to], check=True)
        return (tmp_path / "README.md").read_text()

    before, (clone, index) = (tmp_path / "README.md").read_text(), map(switch, ("clone", "index"))
    assert clone == before  # no index has Tandem yet
    assert 'pip install torch==2.13.0 "tandem-moe[demo]"' in index[: index.index("## ")]
    assert "make run " not in index[: index.index("## ")]
    assert switch("clone") == before
    wrong = subprocess.run([tmp_path / "wheels/readme.sh", "x"], capture_output=True, check=False)
    assert (wrong.returncode, wrong.stderr.count(b"\n")) == (2, 1)
