"""Tests that versions that several files name are equal."""

import re
import tomllib

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tandem.hf.compat import NEWEST_TESTED, OLDEST_SUPPORTED
from tests.conftest import REPOSITORY

PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["project"]
LOCK = (REPOSITORY / "requirements-dev.lock").read_text(encoding="utf-8").splitlines()
LOCKED = dict(line.split("==") for line in LOCK if not line.startswith("#"))


def test_lock_names_versions_alone() -> None:
    pinned = re.compile(r"[\w.-]+==[\w.!]+")
    assert [line for line in LOCK[1:] if not pinned.fullmatch(line)] == []
    assert LOCK[0].startswith("# ")


def test_lock_has_a_version_that_fits_of_every_dependency() -> None:
    locked = {canonicalize_name(name): version for name, version in LOCKED.items()}
    extras = PROJECT["optional-dependencies"]
    requirements = map(
        Requirement,
        (
            PROJECT["dependencies"]
            + extras["dev"]
            + extras["demo"]
            + extras["images"]
            + extras["server"]
        ),
    )
    others = [one for one in requirements if one.name != PROJECT["name"]]
    assert len(others) > 30
    wrong = [
        one for one in others if locked.get(canonicalize_name(one.name), "") not in one.specifier
    ]
    assert wrong == []


def test_extra_tested_names_the_newest_versions_that_are_tested() -> None:
    tested = [f"{name}=={major}.{minor}.*" for name, (major, minor) in NEWEST_TESTED.items()]
    assert PROJECT["optional-dependencies"]["tested"] == tested


def test_the_oldest_versions_are_those_that_doctor_and_the_seam_know() -> None:
    least = {name: ".".join(map(str, oldest)) for name, oldest in OLDEST_SUPPORTED.items()}
    assert {f"{name}>={version}" for name, version in least.items()} <= set(PROJECT["dependencies"])
    makefile = (REPOSITORY / "Makefile").read_text(encoding="utf-8")
    assert f"\nOLDEST_TRANSFORMERS := {least['transformers']}." in makefile
    assert f"\nTORCH ?= torch=={'.'.join(map(str, NEWEST_TESTED['torch']))}." in makefile
