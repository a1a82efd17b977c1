"""Tests that damaged files end in one sentence: earlier findings, and a few new inputs."""

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.fuzz.__main__ import KINDS, fuzz
from tests.fuzz.kinds import Kind, kinds

CORPUS = Path(__file__).parent / "corpus"
FOUND = sorted(CORPUS.glob("*/*"))
DAMAGED = 40  # `make fuzz-files` tries all kinds


@pytest.fixture(scope="module")
def tried(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Kind]:
    return kinds(tmp_path_factory.mktemp("models"))


def test_every_kind_is_fuzzed(tried: Mapping[str, Kind]) -> None:
    assert tuple(tried) == KINDS


@pytest.mark.parametrize("kind", KINDS)
def test_the_file_as_it_should_be_is_read(tried: Mapping[str, Kind], kind: str) -> None:
    assert tried[kind].answer(tried[kind].seed) == "read"


@pytest.mark.parametrize("file", FOUND, ids=lambda file: f"{file.parent.name}-{file.name}")
def test_what_was_found_is_a_sentence_now(tried: Mapping[str, Kind], file: Path) -> None:
    assert tried[file.parent.name].answer(file.read_bytes()).endswith(("Error", "read"))


@pytest.mark.slow
def test_the_fuzzer_sees_which_branches_a_file_reaches(tmp_path: Path) -> None:
    pytest.importorskip("atheris")
    answers = fuzz(tmp_path, "index", DAMAGED)
    assert answers.total() >= DAMAGED
    assert [answer for answer in answers if " found " in answer] == []
    assert " cov: " in (tmp_path / "index.log").read_text()


_INPUTS = """
import torch
from tests.fuzz.memory import limit_memory
kept = []
for _ in range(4):  # 6 GiB in all
    limit_memory()
    kept.append(torch.empty(3 << 29, dtype=torch.uint8))
limit_memory()
for take in (lambda: bytearray(5 << 30), lambda: torch.empty(5 << 30, dtype=torch.uint8)):
    try:
        take()
    except (MemoryError, RuntimeError) as error:
        print(type(error).__name__)
"""


def test_one_input_may_not_take_what_all_of_them_may() -> None:
    command = [sys.executable, "-c", _INPUTS]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert printed.split() == ["MemoryError", "RuntimeError"]
