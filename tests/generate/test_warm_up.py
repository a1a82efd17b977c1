"""Tests of `Generator.warm_up`: it records steps before the first prompt, and keeps notes."""

from pathlib import Path
from typing import Any

import pytest
import torch

import tandem
from tandem.experts.tracing.events import LayerExecuted
from tandem.generate import trial_notes
from tandem.generate.trial_notes import TrialNote
from tandem.hf.runtime import require_runtime
from tandem.kernels._native import available_isas
from tandem.kernels.dense import CpuThreads
from tests.architectures import build_tiny_model
from tests.hf.tiny import save_tiny_checkpoint

PROMPT = [40, 41, 42, 43]


@pytest.mark.parametrize("architecture", ["qwen3_moe", "lfm2_moe"])
def test_first_steps_are_replayed_and_give_the_same(architecture: str, tmp_path: Path) -> None:
    model = build_tiny_model(architecture)
    model.generation_config.eos_token_id = None
    (expected,) = tandem.Generator(model).generate(PROMPT, max_new_tokens=9)
    for _ in range(2):  # the second time with a note
        generator = tandem.Generator(model)
        generator.warm_up(tmp_path)
        assert generator.recorded_graph is not None
        (answer,) = generator.generate(PROMPT, max_new_tokens=9)
        assert answer.reused_tokens == 0
        assert answer.token_ids == expected.token_ids
    assert len(list(tmp_path.iterdir())) == 1


def test_what_passed_is_not_tried_again(
    model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tandem.Generator(model).warm_up(tmp_path)

    def refuse(*_: object) -> None:
        raise AssertionError("tried again")

    monkeypatch.setattr("tandem.generate.generator.why_no_cpu_slots", refuse)
    tandem.Generator(model).warm_up(tmp_path)
    with pytest.raises(AssertionError, match="tried again"):
        tandem.Generator(model).warm_up(tmp_path / "elsewhere")


def test_what_did_not_pass_is_not_noted(model: Any, tmp_path: Path) -> None:
    tandem.Generator(model, has_replay=False).warm_up(tmp_path)
    tandem.Generator(build_tiny_model("mixtral").half()).warm_up(tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_recording_that_differs_now_is_not_trusted(
    model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tandem.Generator(model).warm_up(tmp_path)
    run = "tandem.recording.recorded_graph.RecordedGraph.run"
    monkeypatch.setattr(run, lambda _self: torch.zeros(1, 1))
    generator = tandem.Generator(model)
    generator.warm_up(tmp_path)
    assert generator.recorded_graph is None
    assert generator.why_slower is not None


def test_listeners_hear_nothing_of_it(tmp_path: Path) -> None:
    model = tandem.load(save_tiny_checkpoint(tmp_path / "tiny"))
    events: list[LayerExecuted] = []
    require_runtime(model).executor.listeners.append(events.append)
    generator = tandem.Generator(model)
    generator.warm_up(tmp_path / "trials")
    assert generator.recorded_graph is not None
    assert events == []


def test_an_executor_that_plans_is_left_alone(tmp_path: Path) -> None:
    model = tandem.load(
        save_tiny_checkpoint(tmp_path / "tiny"),
        device="emulated", gpu_memory="1MB", cache_dir=str(tmp_path),
    )  # fmt: skip
    generator = tandem.Generator(model)
    generator.warm_up(tmp_path / "trials")
    assert generator.recorded_graph is None
    assert not (tmp_path / "trials").exists()


def test_a_note_is_of_one_model_as_it_is_loaded(
    model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    isa, *_, other_isa = available_isas()
    threads = CpuThreads(num_threads=1, isa=isa)
    note = TrialNote(tmp_path, model, threads, "auto")
    note.write()
    assert TrialNote(tmp_path, model, threads, "auto").is_there
    assert not TrialNote(tmp_path, model, threads, "int8").is_there
    assert not TrialNote(tmp_path, model, CpuThreads(num_threads=1, isa=other_isa), "auto").is_there
    assert not TrialNote(tmp_path, build_tiny_model("mixtral"), threads, "auto").is_there
    monkeypatch.setattr(trial_notes, "_own_files", lambda: iter(["changed"]))
    assert not TrialNote(tmp_path, model, threads, "auto").is_there


def test_where_nothing_can_be_written_steps_are_recorded_all_the_same(
    model: Any, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    generator = tandem.Generator(model)
    generator.warm_up(tmp_path / "file")
    assert generator.recorded_graph is not None
