"""Tests of `--live`: experts and speed below an answer, on a terminal."""

import io
import os
from pathlib import Path
from typing import Any

import pytest
import torch

import tandem
from tandem.cli.live import ExpertHeat, LivePanel
from tandem.cli.main import main
from tandem.core.errors import ConfigError
from tandem.experts.tracing.events import LayerExecuted
from tandem.generate.generator import Generator
from tandem.generate.sampling import SamplingOptions
from tests.hf.tiny import byte_tokenizer


def event(layer: int, *chosen: int) -> LayerExecuted:
    return LayerExecuted(layer, 1, len(chosen), len(chosen), 0, chosen=torch.tensor([chosen]))


def test_cells_of_experts_that_are_used_are_darker() -> None:
    heat = ExpertHeat(dict.fromkeys(range(16), 8), width=4)
    for _ in range(3):
        heat(event(15, 0, 1))
    heat(event(14, 7))
    heat(event(99, 3))  # of a layer that drafts
    *rest, last = heat.lines()
    assert len(rest) == 7
    assert last == "layer  14 @  :"
    assert {line[9:] for line in rest} == {" " * 5}


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("device", ["cpu", "emulated"])
def test_an_answer_leaves_the_terminal_as_it_was(
    checkpoint: Path, device: str, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setattr("shutil.get_terminal_size", lambda: os.terminal_size((60, 24)))
    options: dict[str, Any] = {} if device == "cpu" else {"device": device, "gpu_memory": "200KB"}
    model = tandem.load(checkpoint, **options)
    generator, out = Generator(model, byte_tokenizer()), Terminal()
    ticks = iter(range(1000))
    with LivePanel(model, out, clock=lambda: float(next(ticks))) as panel:
        sampling = SamplingOptions(max_new_tokens=4, temperature=0.0)
        generator.answer((3, 4, 5), sampling, panel.show)
    written = out.getvalue()
    assert "\x1b[1;19r" in written  # four layers and a line stay below
    assert written.endswith("\x1b[r\x1b[24;1H\n")
    assert "@" in written
    assert ("on the device" in written) == (device != "cpu")
    assert panel._heat not in panel._executor.listeners


def test_without_a_terminal_it_says_so(
    checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ConfigError, match="draws on a terminal of 16 lines or more"):
        LivePanel(tandem.load(checkpoint), io.StringIO())
    assert main(["run", str(checkpoint), "-p", "x", "--live", "--quiet"]) == 2
    assert "--live draws and --quiet draws nothing" in capsys.readouterr().err
