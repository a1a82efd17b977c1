"""Tests of the hosted CI: existing commands, pinned actions, few permissions, no secrets."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.conftest import REPOSITORY

WORKFLOWS = sorted((REPOSITORY / ".github/workflows").glob("*.yml"))
# Permissions that a job may write, and why: PyPI's trusted publishing uses an identity, no token.
WRITES = {("release", "publish"): {"id-token": "write"}}
SECRETS: set[str] = set()

by_workflow = pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)


def read(path: Path) -> dict[Any, Any]:
    document: dict[Any, Any] = yaml.safe_load(path.read_text(encoding="utf-8"))
    return document


def test_there_are_workflows_for_pull_requests_nights_and_releases() -> None:
    assert [path.stem for path in WORKFLOWS] == ["ci", "nightly", "release"]


@by_workflow
def test_make_targets_of_workflows_exist(path: Path) -> None:
    makefile = (REPOSITORY / "Makefile").read_text(encoding="utf-8")
    named = set(re.findall(r"run: make ([a-z-]+)", path.read_text(encoding="utf-8")))
    assert named
    assert {name for name in named if f"\n{name}:" not in makefile} == set()


@by_workflow
def test_actions_are_pinned_to_a_commit_and_name_its_version(path: Path) -> None:
    used = re.findall(r"uses: (.*)", path.read_text(encoding="utf-8"))
    assert used
    pinned = re.compile(r"[\w-]+/[\w-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+")
    assert [one for one in used if not pinned.fullmatch(one)] == []


@by_workflow
def test_jobs_may_read_the_repository_and_no_more_than_is_declared(path: Path) -> None:
    workflow = read(path)
    assert workflow["permissions"] == {"contents": "read"}
    own = {
        (path.stem, name): job["permissions"]
        for name, job in workflow["jobs"].items()
        if "permissions" in job
    }
    assert own == {job: rights for job, rights in WRITES.items() if job[0] == path.stem}


@by_workflow
def test_workflows_name_no_secrets_but_those_declared(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert set(re.findall(r"secrets\.(\w+)", text)) <= SECRETS
    assert "pull_request_target" not in text  # it would run a stranger's code with our rights


def test_a_release_begins_with_a_tag_of_three_numbers_alone() -> None:
    # make would expand what a tag of another form holds.
    triggers = read(REPOSITORY / ".github/workflows/release.yml")[True]  # YAML 1.1: "on" is true
    assert triggers == {"push": {"tags": ["v[0-9]+.[0-9]+.[0-9]+"]}}


@by_workflow
def test_no_command_holds_what_a_stranger_can_write(path: Path) -> None:
    jobs = read(path)["jobs"].values()
    commands = [step["run"] for job in jobs for step in job["steps"] if "run" in step]
    inserted = {name for one in commands for name in re.findall(r"\$\{\{ *(.*?) *\}\}", one)}
    assert inserted <= {"matrix.run"}
