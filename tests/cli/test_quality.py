"""Tests of `tandem quality`: against a model, against stored logits, and refused options."""

import json
from pathlib import Path
from typing import Any

import pytest

import tandem
from tandem.cli.main import main
from tests.hf.tiny import byte_tokenizer, save_tiny_checkpoint


@pytest.fixture
def texts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setenv("TANDEM_CACHE", str(tmp_path / "cache"))
    words: list[str] = []
    for name, text in (("prose", "The quick brown fox. " * 20), ("code", "x = f(y)\n" * 40)):
        (tmp_path / f"{name}.txt").write_text(text)
        words += ["--text", str(tmp_path / f"{name}.txt")]
    return words


def report(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(capsys.readouterr().out.splitlines()[-1])
    return found


def test_a_model_against_its_16_bit_checkpoint_and_against_what_was_kept_of_it(
    model: str, texts: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kept = str(tmp_path / "kept.logits")
    common = ["quality", model, "--threads", "1", "-q", "--json"]
    words = [*common, "--expert-dtype", "int4"]
    assert main([*words, "--against", model, *texts, "--tokens", "80", "--keep", kept]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[1:-1]] == ["prose", "code", "all"]
    found = json.loads(lines[-1])
    assert found["tokens"] == 80
    assert 0 < found["kl_mean"] < found["kl_p99"] < 1
    assert found["domains"]["code"]["tokens"] == 40
    assert not list((tmp_path / "cache").glob("quality-*"))

    assert main([*words, "--against", kept]) == 0
    again = report(capsys)
    assert again | {"against": model} == found
    assert main([*common, "--dense-dtype", "none", "--against", kept]) == 0
    itself = report(capsys)
    assert itself["kl_mean"] < 1e-6
    assert itself["perplexity"] == pytest.approx(found["reference_perplexity"], rel=1e-4)
    assert main([*common, *texts, "--tokens", "80"]) == 0
    assert report(capsys)["perplexity"] == pytest.approx(itself["perplexity"], rel=1e-6)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--tokens", "3"], "tokens is 3; expected a number of tokens >= 16"),
        (["--text", "/no/such.txt"], "/no/such.txt: found no such file; expected a text"),
        (["--against", "{kept}", "--tokens", "99"], "has its text with it; leave --text, --tokens"),
        (["--against", "{kept}"], "{kept} is damaged"),
        (["--keep", "/no/such/file"], "--keep: there is no folder /no/such; make it first"),
        (
            ["--against", "{other}"],
            "{other} tokenize the text differently; compare models with the",
        ),
    ],
)
def test_mistakes_are_one_sentence(
    words: list[str], sentence: str, model: str, tmp_path: Path, texts: list[str],
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    places = {"kept": tmp_path / "kept", "other": tmp_path / "other"}
    places["kept"].write_bytes(b"no logits")
    if "{other}" in words:
        save_tiny_checkpoint(places["other"])
        tokenizer = byte_tokenizer()
        tokenizer.add_tokens(["quick"])
        tokenizer.save_pretrained(places["other"])
        words = [*words, *texts]
    assert main(["quality", model, "-q", *(word.format(**places) for word in words)]) == 2
    assert sentence.format(**places) in capsys.readouterr().err


def test_a_model_larger_than_memory_is_measured_from_the_disk(
    texts: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, packed = save_tiny_checkpoint(tmp_path / "tiny"), tmp_path / "packed"
    tandem.pack(source, packed, expert_dtype="int8")
    words = ["quality", str(packed), "--threads", "1", "-q", "--json", *texts, "--tokens", "40"]
    assert main(words) == 0
    whole = report(capsys)
    assert main([*words, "--expert-memory", "400KB"]) == 0
    assert report(capsys)["perplexity"] == pytest.approx(whole["perplexity"], rel=1e-6)
