"""Tests of `tandem bench` for a whole model: ceilings first, JSON last, parts that add up."""

import json
from pathlib import Path

import numpy as np
import pytest

from tandem.cli.main import main
from tandem.trace import RoutingTrace, TraceMeta, write_trace

SMALL = ["bench", "--shape", "olmoe", "--layers", "1", "--vocabulary", "1000", "--threads", "1"]
JSON_KEYS = {
    *("shape", "layers", "batch", "depth", "ceiling", "time_to_first_token_seconds"),
    *("prefill_tokens_per_second", "decode_tokens_per_second", "milliseconds"),
}


@pytest.mark.parametrize(
    "more",
    [["--batch", "2", "--depth", "20"], pytest.param(["--no-compile"], marks=pytest.mark.slow)],
)
def test_prints_the_ceiling_first_and_json_last(
    more: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    words = [*SMALL, "--prompt", "16", "--gen", "4", *more]
    assert main(words) == 0
    plain = capsys.readouterr().out
    assert "milliseconds of a decode step" not in plain
    assert "not native" not in plain
    assert main([*words, "--verbose", "--json"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "ceiling" in lines[1]
    report = json.loads(lines[-1])
    assert set(report) >= JSON_KEYS
    parts = report["milliseconds"]
    assert set(parts) == {
        "router", "plan", "experts", "dense", "attention", "sampling", "other"
    }  # fmt: skip
    assert all(value >= 0 for value in parts.values())
    not_native = [line for line in lines if line.startswith("not native: ")]
    assert len(not_native) == 1
    if "--batch" in more:
        assert (report["batch"], report["depth"]) == (2, 20)
        assert parts["experts"] > 0
        assert parts["attention"] > 0
        # Two rows that choose eight experts each touch eight to sixteen.
        experts = report["step_bytes"] / (3 * 2048 * 1024 * 4.5 / 8)
        assert 8 < experts < 16 + 12
        assert report["not_native"] == []
        assert "nothing" in not_native[0]
    else:
        assert report["not_native"] is None


@pytest.mark.slow
def test_experts_run_on_the_emulated_device(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))  # the profile is stored there
    words = ["--prompt", "16", "--gen", "2", "--device", "emulated", "--json"]
    assert main([*SMALL, *words]) == 0
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert report["milliseconds"]["plan"] > 0


def trace_of_two_experts(path: Path, num_moe_layers: int) -> str:
    experts = np.zeros((40, num_moe_layers, 8), dtype=np.uint8)
    experts[..., :] = np.arange(8)
    meta = TraceMeta(model="olmoe", n_moe_layers=num_moe_layers, n_experts=64, top_k=8)
    offsets = np.array([0, 40])
    write_trace(path, RoutingTrace(experts=experts, seq_offsets=offsets, meta=meta))
    return str(path)


def test_a_replayed_trace_decides_which_experts_are_touched(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    words = [*SMALL, "--prompt", "16", "--gen", "4", "--batch", "4", "--json", "--replay"]
    assert main([*words, trace_of_two_experts(tmp_path / "a.npz", 1)]) == 0
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    # Four rows that all choose the same eight experts; the rest is attention, router and head.
    experts = report["step_bytes"] / (3 * 2048 * 1024 * 4.5 / 8)
    assert 8 < experts < 8 + 12
    assert main([*words, trace_of_two_experts(tmp_path / "b.npz", 2)]) == 2
    assert "the trace is of a model with 2 MoE layers" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["bench", "--shape", "olmo"], "did you mean 'olmoe'"),
        (["bench", "--batch", "0"], "batch is 0"),
        (["bench", "--depth", "-1"], "depth is -1"),
        ([*SMALL, "--dense-dtype", "int9"], "dense_dtype is 'int9'"),
        ([*SMALL, "--expert-dtype", "fp32"], "random experts are packed"),
    ],
)
def test_mistakes_get_one_sentence(
    words: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 2
    error = capsys.readouterr().err
    assert sentence in error
    assert "Traceback" not in error
