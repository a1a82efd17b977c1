"""Tests of the comparison of two shapes' shares of their ceilings: layers, ratios, one real run."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from benchmarks.generation.shares import layers_within, ratios, shares, weight_bytes
from benchmarks.generation.systems.setting import ShapeSetting

from tandem.bench.model_shapes import find_shape
from tandem.bench.peers.setting import Speeds
from tests.conftest import REPOSITORY

SETTING = ShapeSetting(
    shape="qwen3-30b-a3b", layers=1, vocabulary=32_000, threads=2, prompt=8, steps=2,
    expert_dtype="mxfp4", dense_dtype="int8", kv_dtype="auto", gguf=Path(),
    has_flash_attention=False,
)  # fmt: skip


def test_ratios_are_of_shares_and_medians_of_turns_next_to_each_other() -> None:
    ours = [Speeds(50, 8, 10, 100), Speeds(30, 6, 10, 100), Speeds(90, 9, 10, 100)]
    theirs = [Speeds(100, 16, 20, 100), Speeds(10, 3, 10, 20), Speeds(90, 9, 10, 100)]
    assert shares(ours[0]) == (0.5, 0.8)
    assert ratios(ours, theirs) == (0.6, 1)


def test_as_many_layers_as_fit() -> None:
    assert [layers_within(n, 5, lambda count: 10 + 20 * count) for n in (30, 69, 70, 999)] == [
        1, 2, 3, 5,
    ]  # fmt: skip
    with pytest.raises(SystemExit, match=r"one layer takes .* are left"):
        layers_within(29, 5, lambda count: 10 + 20 * count)


def test_ten_gigabytes_hold_layers_of_both_kinds_of_deepseek_v4() -> None:
    """Each layer has 256 experts of 25 million weights at 4.25 bits, and dense parts."""
    shape = find_shape("deepseek-v4-flash")
    layer = weight_bytes(SETTING, shape, 2) - weight_bytes(SETTING, shape, 1)
    experts = 256 * 3 * 4096 * 2048 * 17 // 32
    assert experts < layer / 2 + experts / 2 < 1.1 * experts
    assert weight_bytes(SETTING, shape, 2) < 8e9


@pytest.mark.slow
def test_two_shapes_are_compared() -> None:
    command = [
        *(sys.executable, "-m", "benchmarks.generation.shares", "--shape", "olmoe"),
        *("--memory", "750MB", "--over-layers", "1", "--vocabulary", "512", "--prompt", "8"),
        *("--steps", "2", "--rounds", "1", "--threads", "1"),
    ]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    assert report["layers"]["qwen3-30b-a3b"] == 1
    (found,) = report["shares"]
    assert found["prefill"] > 0
    assert found["decode"] > 0
