"""Tests of errors in building wheels: one sentence; make check-wheel checks the wheels."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def error_of(*command: str, **environment: str) -> str:
    """Return the one-sentence error of a refused command."""
    env = os.environ | environment
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=env)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1), done.stderr
    return done.stderr


@pytest.mark.parametrize("script", ["build", "check"])
def test_a_python_that_does_not_run_is_named_with_those_that_do(
    script: str, tmp_path: Path
) -> None:
    # As the name of a pyenv version on the PATH that is not selected.
    pretended = tmp_path / "python3.12"
    pretended.write_text("#!/bin/sh\nexit 127\n")
    pretended.chmod(0o755)
    path = os.pathsep.join((str(tmp_path), str(Path(sys.executable).parent), os.environ["PATH"]))
    refused = error_of(str(ROOT / f"wheels/{script}.sh"), str(tmp_path), "python3.12", PATH=path)
    assert refused.startswith("wheels: python3.12 does not run here as Python 3.11 or newer;")
    offered = re.search(r"these do: (.*); name one", refused)
    assert offered is not None
    assert "python3" in offered[1].split()
    assert "python3.12" not in offered[1].split()


def test_a_python_without_headers_is_told_before_anything_is_built(tmp_path: Path) -> None:
    # As Debian's without python3-dev.
    pretended = tmp_path / "python3"
    code = f'case $2 in *sysconfig*) echo {tmp_path}/include;; *) exec {sys.executable} "$@";; esac'
    pretended.write_text(f"#!/bin/sh\n{code}\n")
    pretended.chmod(0o755)
    refused = error_of(str(ROOT / "wheels/build.sh"), str(tmp_path), str(pretended))
    assert f"has no {tmp_path}/include/Python.h" in refused
    assert "python3-dev" in refused


def test_a_package_that_cannot_be_had_is_one_sentence(tmp_path: Path) -> None:
    # With an empty package index, as on a machine without network.
    (tmp_path / "pip.conf").write_text("[global]\nno-index = true\n")
    config = {name: "" for name in os.environ if name.startswith("PIP_")}
    config["PIP_CONFIG_FILE"] = str(tmp_path / "pip.conf")
    refused = error_of(str(ROOT / "wheels/install.sh"), sys.prefix, "no-such-package>=3", **config)
    assert refused.startswith("wheels: pip could not install no-such-package>=3 (")
    assert "PIP_INDEX_URL" in refused


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A repository of one commit, in which building and checking a wheel only print a line."""
    (tmp_path / "wheels").mkdir()
    shutil.copy(ROOT / "wheels/commits.sh", tmp_path / "wheels/commits.sh")
    (tmp_path / "Makefile").write_text("wheel check-wheel:\n\t@echo did $@\n")
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", ".")
    commit(tmp_path, "first")
    return tmp_path


def git(directory: Path, *words: str) -> None:
    # Without this machine's configuration, such as signatures.
    nothing = {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_SYSTEM": os.devnull}
    env = {"PATH": os.environ["PATH"], **nothing}
    subprocess.run(["git", *words], cwd=directory, env=env, check=True)


def commit(directory: Path, message: str) -> None:
    who = ("-c", "user.name=Tandem", "-c", "user.email=tandem@example.org")
    git(directory, *who, "commit", "-q", "-a", "-m", message)


def check_commits(clone: Path, since: str) -> str:
    command = [str(clone / "wheels/commits.sh"), since]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize("file", ["csrc/deep/kernel.cpp", "wheels/new.sh", "pyproject.toml"])
def test_a_commit_to_what_wheels_are_built_from_gets_a_wheel(clone: Path, file: str) -> None:
    (clone / file).parent.mkdir(parents=True, exist_ok=True)
    (clone / file).write_text("new")
    git(clone, "add", ".")
    commit(clone, "change what is built")
    (clone / "README.md").write_text("new")
    git(clone, "add", ".")
    commit(clone, "change a document")
    assert "no commit since HEAD~1 touches" in check_commits(clone, "HEAD~1")
    done = check_commits(clone, "HEAD~2")
    assert "change what is built" in done
    assert "change a document" not in done
    assert done.endswith("did wheel\ndid check-wheel\n")


def test_changes_that_no_commit_has_are_not_taken_for_checked(clone: Path) -> None:
    (clone / "pyproject.toml").write_text("new")
    assert "not committed" in error_of(str(clone / "wheels/commits.sh"), "HEAD")


def test_an_unknown_commit_is_one_sentence(clone: Path) -> None:
    assert "there is no commit nonsense here" in error_of(
        str(clone / "wheels/commits.sh"), "nonsense"
    )


def test_documents_install_the_version_that_is_built() -> None:
    version = re.search(r'^version = "(.*)"', (ROOT / "pyproject.toml").read_text(), re.M)
    assert version is not None
    named = re.findall(r"tandem_moe-([\d.]+)-", (ROOT / "docs/installing.md").read_text())
    assert set(named) == {version[1]}
