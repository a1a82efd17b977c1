"""Tests of `tandem pack --size` and `--bits` as a user starts them."""

import json
from pathlib import Path

import pytest
import torch

import tandem
from tandem.checkpoint.importance import save_importance
from tandem.checkpoint.input_squares import InputSquares
from tandem.cli.main import main
from tandem.hf.config import PACKED_FORMAT_VERSION
from tandem.hf.runtime import require_runtime
from tandem.kernels.formats.weight_format import find_expert_format
from tests.hf.tiny import save_tiny_dense

TOKENS = torch.tensor([100])


def test_a_recipe_is_kept_repeated_and_runs(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TANDEM_CACHE", str(tmp_path / "cache"))
    (tmp_path / "text.txt").write_text("The quick brown fox. " * 40)
    assert main(["pack", model, "--size", "1MB", "-o", str(tmp_path / "none"), "-q"]) == 2
    assert "collect it first: tandem importance" in capsys.readouterr().err
    collect = [model, "--text", str(tmp_path / "text.txt"), "--tokens", "100", "-q"]
    assert main(["importance", *collect, "--probe-tokens", "64", "--threads", "1"]) == 0
    capsys.readouterr()

    reports = []
    for name, flags in (("a", ["--bits", "7"]), ("b", ["--bits", "7"])):
        target = str(tmp_path / name)
        assert main(["pack", model, *flags, "-o", target, "-q", "--json"]) == 0
        reports.append(json.loads(capsys.readouterr().out.splitlines()[-1]))
    for key in ("bytes", "expert_formats", "dense_formats"):
        assert reports[0][key] == reports[1][key]
    assert len(set(reports[0]["dense_formats"].values())) > 1

    kept = json.loads((tmp_path / "a" / "config.json").read_text())["quantization_config"]
    loaded = tandem.load(tmp_path / "a", threads=1)
    store = require_runtime(loaded).store
    assert [x.layout.format_name for x in store] == [  # type: ignore[union-attr]
        find_expert_format(name).name for name in reports[0]["expert_formats"]
    ]
    assert kept["packed_format"] == PACKED_FORMAT_VERSION
    embeddings = loaded.get_input_embeddings()
    expected = reports[0]["dense_formats"]["model.embed_tokens"]
    assert embeddings.packed.matrix.format.name == expected
    with torch.no_grad():
        logits = loaded(input_ids=torch.tensor([[5, 6, 7]])).logits
    assert logits.isfinite().all()

    again = tandem.save(loaded, tmp_path / "again")
    copy = tandem.load(again, threads=1)
    with torch.no_grad():
        assert torch.equal(copy(input_ids=torch.tensor([[5, 6, 7]])).logits, logits)
    assert main(["run", str(tmp_path / "a"), "-p", "x", "-q", "--max-new-tokens", "2"]) == 0


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--size", "1KB"], "no recipe takes 1000 B: this model takes from"),
        (["--size", "9GB"], "no recipe takes 8.38 GiB: this model takes from"),
        (
            ["--size", "1GB", "--bits", "4"],
            "--size and --bits set the same thing; give one of them",
        ),
        (["--bits", "99"], "bits"),
        (["--size", "big"], "expected a size such as 8GiB"),
        (["--bits", "4", "--expert-dtype", "int4"], "leave --expert-dtype and --dense-dtype out"),
    ],
)
def test_impossible_sizes_are_one_sentence(
    model: str,
    tmp_path: Path,
    flags: list[str],
    sentence: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    importance = tmp_path / "imatrix.safetensors"
    head = InputSquares(torch.ones(1, 64), TOKENS)
    save_importance(importance, {"lm_head.weight": head})
    words = ["pack", model, "-o", str(tmp_path / "x"), "-q", "--importance", str(importance)]
    assert main([*words, *flags]) == 2
    error = capsys.readouterr().err
    assert sentence in error
    assert error.count("\n") == 1


def test_a_dense_model_has_a_recipe_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = save_tiny_dense(tmp_path / "tiny")
    hidden = tandem.load(source, threads=1).config.hidden_size
    importance = tmp_path / "importance.safetensors"
    save_importance(importance, {"lm_head.weight": InputSquares(torch.ones(1, hidden), TOKENS)})
    words = ["pack", str(source), "--bits", "7", "--importance", str(importance), "-q", "--json"]
    assert main([*words, "-o", str(tmp_path / "packed")]) == 0
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert report["expert_formats"] is None
    assert len(set(report["dense_formats"].values())) > 1
    with torch.no_grad():
        found = tandem.load(tmp_path / "packed", threads=1)(input_ids=torch.tensor([[5, 6]])).logits
    assert found.isfinite().all()
