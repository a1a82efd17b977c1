"""Tests of the commands with a model without experts."""

import json
from pathlib import Path

import pytest

import tandem
from tandem.bench.generation import Workload, ceiling_of, dense_bytes, measure
from tandem.bench.kernels import Ceiling
from tandem.cli.main import main
from tandem.forecast.self_check import check_model
from tandem.hf.checkpoint import open_model
from tandem.hf.config import OffloadConfig
from tests.hf.tiny import save_tiny_dense

FLAGS = ["-p", "hello", "--max-new-tokens", "4", "--temperature", "0"]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_tiny_dense(tmp_path_factory.mktemp("dense") / "model"))


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TANDEM_CACHE", str(tmp_path / "cache"))


def test_run_says_that_there_are_no_experts(
    checkpoint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", checkpoint, *FLAGS, "--json"]) == 0
    captured = capsys.readouterr()
    assert "a dense model: it has no experts to share" in captured.err
    assert "experts read" not in captured.err
    assert json.loads(captured.out.splitlines()[-1])["generated_tokens"] == 4


def test_run_refuses_what_is_of_experts(
    checkpoint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", checkpoint, *FLAGS, "--expert-dtype", "int4"]) == 2
    assert "expert_dtype: only for experts" in capsys.readouterr().err


def test_plan_counts_linear_layers(checkpoint: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", checkpoint, "--dense-dtype", "int8", "--json"]) == 0
    text, _, last = capsys.readouterr().out.rstrip().rpartition("\n")
    assert text.startswith("a dense model: it has no experts to share\n")
    assert "experts (" not in text
    assert "\nfeed-forward " in text
    plan = json.loads(last)
    assert (plan["experts"], plan["parts_bytes"]["experts"], plan["expert_formats"]) == (0, 0, [])
    assert plan["decode_tokens_per_second"] > 0
    main(["plan", checkpoint, "--dense-dtype", "none", "--json"])
    text, _, last = capsys.readouterr().out.rstrip().rpartition("\n")
    assert "with --dense-dtype int8: " in text
    assert "speed: its linear layers are in fp32" in text
    plain = json.loads(last)
    assert sum(plan["parts_bytes"].values()) < 0.6 * sum(plain["parts_bytes"].values())
    assert main(["plan", checkpoint, "--eviction", "lru", "--expert-memory", "1GB"]) == 2
    assert "expert_memory, eviction: only for experts" in capsys.readouterr().err


@pytest.mark.parametrize("dense_dtype", ["none", "int4"])
def test_a_packed_copy_answers_alike(
    checkpoint: str, dense_dtype: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    packed = str(tmp_path / "packed")
    assert main(["pack", checkpoint, "-o", packed, "--dense-dtype", dense_dtype, "-q"]) == 0
    texts = []
    for model in (checkpoint, packed):
        assert main(["run", model, *FLAGS, "--dense-dtype", dense_dtype, "-q", "--json"]) == 0
        texts.append(json.loads(capsys.readouterr().out.splitlines()[-1])["text"])
    assert texts[0] == texts[1]
    assert main(["plan", packed, "--no-measure"]) == 0
    assert "a dense model" in capsys.readouterr().out


def test_doctor_compares_linear_layers(
    checkpoint: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tandem.forecast.machine_check.check_machine", lambda *_, **__: ())
    main(["doctor", checkpoint])
    assert "ok   kernels" in capsys.readouterr().out
    assert check_model(open_model(Path(checkpoint)), OffloadConfig(threads=1)).kl > 0


def test_bench_measures_steps(checkpoint: str) -> None:
    model = tandem.load(checkpoint, dense_dtype="int8", threads=1)
    work = Workload(prompt_tokens=8, new_tokens=2)
    measured = measure(model, tandem.Generator(model), work)
    assert measured.milliseconds["experts"] == measured.milliseconds["router"] == 0
    assert measured.milliseconds["dense"] > 0
    assert measured.step_bytes > dense_bytes(model) > 0
    machine = Ceiling(1.0, 1.0, 1.0, 1.0)
    ceiling = ceiling_of(model, work, machine, measured.step_bytes)
    assert 0 < ceiling.decode_tokens_per_second < ceiling.prefill_tokens_per_second


def test_a_dense_shape_is_planned_and_refuses_formats_of_experts(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["plan", "--shape", "qwen3-8b", "--dense-dtype", "int4", "--no-measure"]) == 0
    assert "a dense model" in capsys.readouterr().out
    small = ["--layers", "1", "--vocabulary", "512"]
    assert main(["bench", "--shape", "qwen3-8b", *small, "--expert-dtype", "int4"]) == 2
    assert "expert_dtype: only for experts" in capsys.readouterr().err
