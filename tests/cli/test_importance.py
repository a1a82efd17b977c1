"""Tests of `tandem importance` as a user starts it, and of commands that read its file."""

import json
from pathlib import Path

import pytest

from tandem.cli.main import main


def test_what_is_collected_is_found_by_auto(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TANDEM_CACHE", str(tmp_path / "cache"))
    (tmp_path / "text.txt").write_text("The quick brown fox. " * 20)
    words = [model, "--text", str(tmp_path / "text.txt"), "-q", "--json"]
    plain = ["--expert-dtype", "int4", "--dense-dtype", "none", "--threads", "1"]
    no_probes = ["--probe-tokens", "0"]
    auto = [*plain, "--importance", "auto"]
    assert main(["quality", *words, "--tokens", "40", *auto]) == 2
    assert "collect it first: tandem importance" in capsys.readouterr().err
    assert main(["importance", *words, "--tokens", "200", "--threads", "1", *no_probes]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found["tokens"] == 200
    assert Path(found["file"]).parent == tmp_path / "cache" / "importance"

    assert main(["quality", *words, "--tokens", "200", "--against", model, *auto]) == 0
    weighed = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert main(["quality", *words, "--tokens", "200", "--against", model, *plain]) == 0
    assert weighed["kl_mean"] != json.loads(capsys.readouterr().out.splitlines()[-1])["kl_mean"]

    packed = str(tmp_path / "packed")
    own = ["--importance", found["file"]]
    assert main(["pack", model, "-o", packed, "--expert-dtype", "int4", *own, "-q"]) == 0
    capsys.readouterr()
    last = ["--dense-dtype", "none", "--threads", "1"]
    assert main(["quality", packed, *words[1:], "--tokens", "200", "--against", model, *last]) == 0
    again = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert again["kl_mean"] == pytest.approx(weighed["kl_mean"], rel=1e-6)


def test_mistakes_are_one_sentence(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["importance", model, "-o", "/no/such/file", "-q"]) == 2
    assert "--output: there is no folder /no/such" in capsys.readouterr().err
    assert main(["run", model, "--importance", "/no/such", "-p", "x", "-q"]) == 2
    assert "importance is '/no/such', which is not a file" in capsys.readouterr().err
