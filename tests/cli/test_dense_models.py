"""The commands with a model without experts."""

import json
from pathlib import Path

import pytest

from tandem.cli.main import main
from tests.hf.tiny import save_tiny_dense

ASKED = ["-p", "hello", "--max-new-tokens", "4", "--temperature", "0"]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_tiny_dense(tmp_path_factory.mktemp("dense") / "model"))


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TANDEM_CACHE", str(tmp_path / "cache"))


def test_run_says_that_there_are_no_experts(
    checkpoint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", checkpoint, *ASKED, "--json"]) == 0
    said = capsys.readouterr()
    assert "a dense model: it has no experts to share" in said.err
    assert "experts read" not in said.err
    assert json.loads(said.out.splitlines()[-1])["generated_tokens"] == 4


def test_run_refuses_what_is_of_experts(
    checkpoint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", checkpoint, *ASKED, "--expert-dtype", "int4"]) == 2
    assert "expert_dtype: that is of experts" in capsys.readouterr().err
