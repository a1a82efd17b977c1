"""Tests of `tandem calibrate` as a user starts it, and of the file that the next run reads."""

import json
from pathlib import Path

import numpy as np
import pytest

import tandem
from tandem.bench.calibration import accuracy_by_batch, calibrate
from tandem.core.errors import ConfigError
from tandem.trace import RoutingTrace, TraceMeta
from tests import programs
from tests.hf.test_hybrid import load
from tests.hf.tiny import save_tiny_checkpoint
from tests.inside import runtime_in
from tests.programs import ENVIRONMENT

TEXT = "The quick brown fox jumps over the lazy dog, and the dog sleeps on. " * 30


def test_vectors_are_written_and_used_by_the_next_run(tmp_path: Path, profile: str) -> None:
    model = save_tiny_checkpoint(tmp_path / "tiny")
    (tmp_path / "text.txt").write_text(TEXT)
    words = ["calibrate", str(model), "--json", "--text", str(tmp_path / "text.txt")]
    done = programs.tandem(*words, env={**ENVIRONMENT, "TANDEM_CACHE": str(tmp_path / "cache")})
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    assert report["cosine"]["residual"] > report["cosine"]["gate"]
    assert set(report["accuracy"]) == {"gate", "residual"}
    assert len(report["accuracy"]["gate"]) == len(report["batches"])
    options = {"prediction": "residual", "cache_dir": str(tmp_path / "cache")}
    executor = runtime_in(load(model, profile, **options)).executor
    assert executor.look_ahead.residuals.is_fixed
    assert executor.look_ahead.residuals.means.any()


def test_a_text_that_is_too_short_is_refused(checkpoint: Path) -> None:
    model = tandem.load(checkpoint, dtype="float32")
    with pytest.raises(ConfigError, match="the text has 20 tokens; expected at least 1024"):
        calibrate(model, range(20))


def test_accuracy_counts_the_highest_workloads() -> None:
    experts = np.array([[[0, 1], [0, 1]], [[0, 1], [0, 2]]], dtype=np.uint8)
    predicted = np.array([[[[0, 0]], [[0, 3]]], [[[0, 0]], [[0, 1]]]], dtype=np.uint8)
    trace = RoutingTrace(
        meta=TraceMeta(model="m", n_moe_layers=2, n_experts=4, top_k=2, predictors=("gate",)),
        experts=experts,
        seq_offsets=np.array([0, 2]),
        predicted=predicted,
    )
    # The tokens use expert 0 of layer 1 twice, 1 and 2 once; predicted are 0 twice, 1 and 3 once.
    assert accuracy_by_batch(trace, 1, [2]) == {"gate": [1.0]}
    assert accuracy_by_batch(trace, 2, [2]) == {"gate": [1.0]}
    assert accuracy_by_batch(trace, 2, [1]) == {"gate": [0.5]}
