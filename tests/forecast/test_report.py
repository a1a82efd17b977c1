"""Tests of `tandem doctor --report`: it names stages that crash or hang, and leaks nothing."""

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from tempfile import gettempdir

import pytest

from tandem.bench.model_shapes import ModelShape
from tandem.cli.main import main
from tandem.core.errors import ConfigError
from tandem.forecast.report import speed_stages
from tandem.forecast.report.document import FIRST_LINE, write_report
from tandem.forecast.report.gpu_stages import small_model
from tandem.forecast.report.record import Record, require_writable, without_private_data
from tandem.forecast.report.speed_stages import on_cpu, on_gpu
from tandem.forecast.report.stages import Outcome, Stage, StageResult, run_stages
from tandem.forecast.windows_check import Finding
from tests.forecast.trial_stages import crashes, hangs, is_not_here, raises, works

SMALL = ModelShape(
    "mixtral",
    {
        "hidden_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4,
        "num_key_value_heads": 2, "num_local_experts": 8, "num_experts_per_tok": 2,
        "intermediate_size": 128, "vocab_size": 512, "max_position_embeddings": 2048,
    },
)  # fmt: skip


def test_stages_after_a_crash_and_a_hang_run() -> None:
    begun: list[str] = []
    stages = [
        Stage("works", works), Stage("raises", raises), Stage("none", is_not_here),
        Stage("crashes", crashes), Stage("hangs", hangs, limit_seconds=0.5),
        Stage("again", works),
    ]  # fmt: skip
    found = list(run_stages(stages, lambda stage: begun.append(stage.name)))
    assert begun == [stage.name for stage in stages]
    states = ["ok", "failed", "not here", "failed", "failed", "ok"]
    assert [outcome.state for outcome in found] == states
    assert found[0].said == StageResult("all is well", {"speed": 2.0})
    assert found[1].said.text.startswith("ValueError: no good in")
    assert "Traceback" in found[1].details
    assert "SIGABRT" in found[3].said.text
    assert "crashes" in found[3].details  # by faulthandler: the line that crashed
    assert "took longer" in found[4].said.text


def test_a_stage_ends_with_a_killed_command(tmp_path: Path) -> None:
    code = (
        "from tandem.forecast.report.stages import Stage, run_stages\n"
        "from tests.forecast.trial_stages import tells_its_number\n"
        "from functools import partial\n"
        f"stage = Stage('x', partial(tells_its_number, {str(tmp_path / 'pid')!r}))\n"
        "if __name__ == '__main__':\n    list(run_stages([stage], print))"
    )
    script = tmp_path / "command.py"
    script.write_text(code)
    command = [sys.executable, str(script)]
    with subprocess.Popen(command, env=os.environ | {"PYTHONPATH": os.getcwd()}) as parent:
        assert comes_true((tmp_path / "pid").exists)
        parent.kill()
    child = int((tmp_path / "pid").read_text())
    assert comes_true(lambda: not Path(f"/proc/{child}").exists())


def comes_true(condition: Callable[[], bool]) -> bool:
    for _ in range(600):
        if condition():
            return True
        time.sleep(0.05)
    return False


def test_nothing_private_is_in_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("USER", "sarah")
    monkeypatch.setenv("LOGNAME", "sarah")
    host = "sarahs-pc"
    monkeypatch.setattr(socket, "gethostname", lambda: host)
    private = f"{Path.home()}/models of sarah on {host}, {gettempdir()}/x, {Path.cwd()}/src, sarahs"
    finding = Finding("disk", "slow", private, f"see {private}")
    outcome = Outcome("raises", "failed", StageResult(private), 0.1, private)
    path = tmp_path / "report.md"
    record = Record(
        versions=[f"tandem 1 on {host}"], findings=[finding], speeds=[outcome], smoke=[outcome]
    )
    write_report(path, record)
    text = path.read_text()
    for secret in (str(Path.home()), host, gettempdir(), str(Path.cwd()), "of sarah"):
        assert secret not in text
    assert "sarahs" in text  # a word of its own
    assert text.startswith(FIRST_LINE)
    data = json.loads(text.partition("```json\n")[2].partition("\n```")[0])
    assert data["speeds"][0]["said"]["text"] == without_private_data(private)
    assert os.listdir(tmp_path) == ["report.md"]
    require_writable(path, FIRST_LINE, "report")  # a report may be written again


@pytest.mark.parametrize("kind", ["other file", "directory", "no directory"])
def test_a_file_that_must_not_be_written_is_refused_first(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "notes.md"
    if kind == "other file":
        path.write_text("my notes")
    elif kind == "directory":
        path.mkdir()
    else:
        path = path / "report.md"
    with pytest.raises(ConfigError, match=r"notes\.md"):
        require_writable(path, FIRST_LINE, "report")
    assert main(["doctor", "--report", str(path)]) == 2
    assert not capsys.readouterr().out


@pytest.mark.slow
def test_the_command_writes_what_it_has_tried(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    stage = Stage("small", partial(on_cpu, SMALL, "int4", rounds=1))
    monkeypatch.setattr(speed_stages, "CPU_SPEED_STAGES", (stage,))
    path = tmp_path / "report.md"
    assert main(["doctor", "--report", str(path), "--threads", "1", "--json"]) == 0
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [outcome["state"] for outcome in report["tried"]] == ["ok", "ok", "ok"]
    numbers = report["tried"][2]["said"]["numbers"]
    assert numbers.pop("others_cores") >= 0
    assert min(numbers.values()) > 0
    assert set(numbers) == {
        *("forecast_prompt", "forecast_decode", "measured_prompt", "measured_decode")
    }
    text = path.read_text()
    assert "recorded steps within" in text
    assert "portable KL at most" in text


def test_the_gpus_stages_on_the_emulated_device() -> None:
    """These stages need no card: the tiny model's answer, a forecast with resident experts."""
    assert small_model("emulated").numbers["kl"] < 1e-3
    for share in (0.5, 1.0):
        assert min(on_gpu(SMALL, share, "emulated").numbers.values()) > 0
