"""Tests of `tandem datapoint`: its file, its notice, and its readers."""

import json
from pathlib import Path

import pytest
from benchmarks.datapoints import BEGIN, FOLDER, table

from tandem.cli import datapoint
from tandem.cli.main import main
from tandem.core.errors import ConfigError, FileFormatError
from tandem.forecast.cpu_forecast import ProfileForecast, forecast_from_profile
from tandem.forecast.gpu_forecast import shape_sizes
from tandem.forecast.report.datapoint import FIRST_LINE, read_rows
from tandem.forecast.report.speed_stages import on_cpu
from tandem.forecast.report.stages import Outcome
from tandem.hardware.profiles import load_profile
from tandem.hf.config import OffloadConfig
from tests.forecast.test_report import SMALL


def test_one_file_says_what_the_machine_is_and_does(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    outcome = Outcome("small", "ok", on_cpu(SMALL, "int4", rounds=1), 1.0)
    monkeypatch.setattr(datapoint, "tried", lambda stages: [outcome])  # without a process
    path = tmp_path / "here.json"
    assert main(["datapoint", str(path), "--json"]) == 0
    printed = capsys.readouterr().out
    assert printed.index("Nothing is sent.") < printed.index("ok   processor")
    assert json.loads(printed.splitlines()[-1])["file"] == str(path)
    text = path.read_text()
    assert text.startswith(FIRST_LINE)
    assert str(Path.home()) not in text
    found = json.loads(text)
    assert {finding["what"] for finding in found["findings"]} >= {"processor", "memory"}
    (row,) = read_rows(path)
    assert row.line.startswith(f"| {load_profile(str(path)).cpu}, ")

    forecast = forecast_from_profile(
        shape_sizes(SMALL, OffloadConfig(expert_dtype="int4")), load_profile(str(path))
    )
    assert isinstance(forecast, ProfileForecast)
    speeds = forecast.prefill_tokens_per_second, forecast.decode_tokens_per_second
    assert speeds == pytest.approx(row.measured, rel=0.2)  # experts alone may take longer
    words = ["plan", "--shape", "olmoe", "--expert-dtype", "int4", "--json"]
    assert main([*words, "--profile", str(path)]) == 0
    planned = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert planned["decode_tokens_per_second"] > 0
    assert main([*words, "--profile", "desktop-12gb"]) == 0
    planned = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert "--device cuda plans for that" in planned["speed_unknown"]


def test_a_file_of_something_else_is_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "package.json"
    path.write_text("{\n}")
    assert main(["datapoint", str(path)]) == 2
    assert "is not a datapoint; name another file" in capsys.readouterr().err
    assert main(["datapoint", str(tmp_path / "here.md")]) == 2
    assert "does not end in .json" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"datapoint": 9}', "format is 9; expected 1"),
        ('{"datapoint": 1, "profile": null}', "has no profile"),
        ('{"datapoint": 1, "profile": []}', "expected an object"),
        ('{"datapoint": 1, "profile": {"name": 5}}', "expected a list of objects"),
    ],
)
def test_a_datapoint_without_a_profile_is_one_sentence(
    text: str, words: str, tmp_path: Path
) -> None:
    path = tmp_path / "x.json"
    path.write_text(text)
    with pytest.raises((ConfigError, FileFormatError), match=words):
        load_profile(str(path))
    with pytest.raises(FileFormatError, match="no datapoint"):
        read_rows(path)


def test_the_page_has_the_datapoints_that_are_there() -> None:
    assert BEGIN + table() in (FOLDER / "README.md").read_text(encoding="utf-8")
