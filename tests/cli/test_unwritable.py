"""Tests of outputs that cannot be written: one sentence, exit code 2, no incomplete file."""

import errno
import os
from pathlib import Path

import numpy as np
import pytest

from tandem.cli import simulate
from tandem.cli.main import main
from tandem.trace import RoutingTrace, TraceMeta, write_trace
from tests.hf.tiny import save_tiny_checkpoint
from tests.programs import ENVIRONMENT, tandem

TRACE = str(Path(__file__).parents[2] / "data" / "traces" / "gpt-oss-20b.npz")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A directory with a model, prompts, a file, and a subdirectory for a trace."""
    save_tiny_checkpoint(tmp_path / "tiny")
    (tmp_path / "file").write_text("x")
    (tmp_path / "prompts.txt").write_text("hello\n")
    (tmp_path / "folder.npz").mkdir()
    return tmp_path


@pytest.mark.parametrize(
    "words",
    [
        ["pack", "{}/tiny", "-o", "{}/file/x"],
        ["profile", "{}/tiny", "--picture", "{}/file/x.svg"],
        ["simulate", TRACE, "--dump", "{}/file/x"],
        ["trace", "record", "{}/tiny", "--prompts", "{}/prompts.txt", "-o", "{}/folder.npz"],
    ],
)
def test_an_output_that_cannot_be_is_one_sentence(folder: Path, words: list[str]) -> None:
    environment = {**ENVIRONMENT, "TANDEM_CACHE": str(folder / "cache")}
    done = tandem(*(word.format(folder) for word in words), env=environment)
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    last = done.stderr.splitlines()[-1]
    assert last.startswith("tandem: error: ")
    assert str(folder) in last
    assert not list(folder.glob("*.partial"))


@pytest.mark.parametrize(
    "words",
    [
        ["plan", "{}/tiny", "--expert-dtype", "int8"],
        ["profile", "{}/tiny"],
        ["run", "{}/tiny", "-p", "x", "--max-new-tokens", "2", "--device", "emulated"],
    ],
)
def test_a_cache_that_cannot_be_written_costs_a_line(folder: Path, words: list[str]) -> None:
    environment = {**ENVIRONMENT, "TANDEM_CACHE": str(folder / "file" / "x")}
    done = tandem(*(word.format(folder) for word in words), env=environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
    warnings = [
        line for line in done.stderr.splitlines() if "what was measured is not kept" in line
    ]
    assert len(warnings) == 1, done.stderr
    assert warnings[0].startswith("[warning: ")
    assert str(folder / "file") in warnings[0]


def test_a_full_disk_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(simulate, "run", full)
    assert main(["simulate", TRACE]) == 2
    assert capsys.readouterr().err.startswith("tandem: error: the disk is full; free some space")


def test_a_trace_that_cannot_be_written_leaves_nothing(tmp_path: Path) -> None:
    trace = RoutingTrace(
        meta=TraceMeta(model="m", n_moe_layers=1, n_experts=4, top_k=1),
        experts=np.zeros((2, 1, 1), dtype=np.uint8),
        seq_offsets=np.array([0, 2]),
    )
    (tmp_path / "t.npz").mkdir()
    with pytest.raises(OSError, match="directory"):
        write_trace(tmp_path / "t.npz", trace)
    assert [path.name for path in tmp_path.iterdir()] == ["t.npz"]
