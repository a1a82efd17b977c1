"""Tests of `--draft` and `--speculate mtp`: which drafter is loaded, and which is not."""

import json
import pickle
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from tandem.cli.drafting import DraftChoice
from tandem.cli.main import main
from tandem.cli.model_choice import ModelChoice
from tandem.core.errors import TandemWarning
from tests.hf.tiny import save_tiny_checkpoint


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_checkpoint(tmp_path_factory.mktemp("models") / "tiny", "qwen3_moe")


def test_a_model_drafts_for_another(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["run", str(checkpoint), "-p", "hello", "--max-new-tokens", "8", "--json", "--quiet"]
    words += ["--temperature", "0", "--no-keep"]
    answers = []
    for more in ([], ["--draft", str(checkpoint)]):
        assert main([*words, *more]) == 0
        answers.append(json.loads(capsys.readouterr().out.splitlines()[-1]))
    assert answers[0]["text"] == answers[1]["text"]


def test_a_model_with_other_tokens_is_left_out(checkpoint: Path, tmp_path: Path) -> None:
    other = save_tiny_checkpoint(tmp_path / "other", "qwen3_moe")
    tokenizer = AutoTokenizer.from_pretrained(other)
    tokenizer.add_tokens(["<new>"])
    tokenizer.save_pretrained(other)
    choice = DraftChoice(ModelChoice(model=str(checkpoint)), str(other), quiet=True)
    choice = pickle.loads(pickle.dumps(choice))  # as the server sends it to the engine process
    with pytest.warns(TandemWarning, match="has another vocabulary than"):
        sources = choice.load(AutoTokenizer.from_pretrained(checkpoint))
    assert sources == {"mtp_from": checkpoint}


def test_a_missing_model_is_one_sentence(
    checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["run", str(checkpoint), "-p", "hello", "--no-keep", "--draft", "/nowhere/at-all"]
    assert main(words) == 2
    assert "/nowhere/at-all" in capsys.readouterr().err.splitlines()[-1]
