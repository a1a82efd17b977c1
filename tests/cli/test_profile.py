"""Tests of `tandem profile`: measured on first use, stored, read again, drawn."""

import json
import os
import re
from pathlib import Path

import pytest

import tandem
from tandem.core.errors import TandemWarning
from tandem.experts.measuring.profiler import with_timed_steps
from tandem.hf.machine.profile import kept_profile
from tandem.policy.cost import HardwareProfile, interpolate
from tests import programs
from tests.experts.machines import make_machine
from tests.inside import runtime_in
from tests.programs import ENVIRONMENT


def test_a_profile_is_measured_kept_and_drawn(model: str, tmp_path: Path) -> None:
    words = ["profile", model, "--json", "--expert-dtype", "int8"]
    words += ["--picture", str(tmp_path / "curves.svg")]
    done = programs.tandem(*words, env={**ENVIRONMENT, "TANDEM_CACHE": str(tmp_path)})
    assert done.returncode == 0, done.stderr
    (kept,) = (tmp_path / "profiles").iterdir()
    printed = done.stdout.splitlines()[-1]
    assert json.loads(printed) == json.loads(kept.read_text())
    profile = HardwareProfile.from_json(printed, where="printed")
    (shape,) = profile.shapes
    assert (shape.num_moe_layers, shape.num_experts, shape.top_k) == (4, 8, 2)
    assert profile.disk is not None
    assert f"{profile.disk.reads} reads of " in done.stdout
    assert all(a <= b for a, b in zip(shape.cpu_seconds, shape.cpu_seconds[1:], strict=False))
    # The rest of a layer is the given step's time without its experts.
    forecast = re.search(r"tokens takes .* s, then ([0-9.]+) tok/s", done.stdout)
    assert forecast, done.stdout
    experts = shape.cpu_first_expert_seconds + shape.top_k * shape.cpu_seconds[0]
    step = shape.num_moe_layers * max(experts, shape.dense_seconds[0] + experts)
    assert 1 / step <= 1.001 * float(forecast[1]) + 0.05
    if shape.dense_seconds[0] > 0:
        assert 1 / step == pytest.approx(float(forecast[1]), rel=1e-3, abs=0.05)
    assert (tmp_path / "curves.svg").read_text().startswith("<svg ")


def test_the_rest_of_a_layer_is_what_whole_steps_took() -> None:
    profile = make_machine(cpu=1e-3, dense=0.5).profile
    timed = with_timed_steps(profile, 256, prompt_seconds=20.0, step_seconds=0.1)
    (before,), (shape,) = profile.shapes, timed.shapes
    active = min(shape.num_experts, 256 * shape.top_k)
    tokens = 256 * shape.top_k // active
    for count, seconds, number, each in ((1, 0.1, shape.top_k, 1), (256, 20.0, active, tokens)):
        rest = interpolate(shape.tokens, shape.dense_seconds, count)
        expert = interpolate(shape.tokens, shape.cpu_seconds, each)
        layer = rest + shape.cpu_first_expert_seconds + number * expert
        assert shape.num_moe_layers * layer == pytest.approx(seconds)
    assert shape.cpu_seconds == before.cpu_seconds


def test_a_kept_profile_is_read_and_another_format_is_measured(model: str, tmp_path: Path) -> None:
    def load(expert_dtype: str) -> float:
        loaded = tandem.load(
            model,
            dtype="float32",
            device="emulated",
            expert_dtype=expert_dtype,
            cache_dir=str(tmp_path),
            link_bandwidth="1GB/s",
            emulated_speed=4.0,
        )
        machine = runtime_in(loaded).executor.cache.machine
        assert machine.shape.link_seconds_per_expert == machine.shape.expert_bytes / 1e9
        ratio: float = machine.shape.cpu_seconds[0] / machine.shape.gpu_seconds[0]
        assert ratio == pytest.approx(4.0)
        return max(os.stat(file).st_mtime_ns for file in (tmp_path / "profiles").iterdir())

    first = load("int8")
    assert load("int8") == first
    load("auto")
    assert len(list((tmp_path / "profiles").iterdir())) == 2


def test_a_damaged_profile_is_measured_again_and_that_is_reported(
    model: str, tmp_path: Path
) -> None:
    words = ["profile", model, "--expert-dtype", "int8"]
    environment = {**ENVIRONMENT, "TANDEM_CACHE": str(tmp_path)}
    programs.tandem(*words, env=environment)
    (kept,) = (tmp_path / "profiles").iterdir()
    kept.write_bytes(kept.read_bytes()[:99])
    done = programs.tandem(*words, env=environment)
    assert done.returncode == 0, done.stderr
    assert f"[warning: the kept profile cannot be used ({kept}: " in done.stderr
    assert "measuring again]" in done.stderr
    HardwareProfile.from_json(kept.read_text(), where="kept")


@pytest.mark.parametrize("damage", [b"", b"{}", b"[]", b"\xff\xfe", b'{"shapes": []}'])
def test_whatever_the_damage_a_kept_profile_is_none(tmp_path: Path, damage: bytes) -> None:
    (tmp_path / "kept.json").write_bytes(damage)
    with pytest.warns(TandemWarning, match="kept.json.*measuring again"):
        assert kept_profile(tmp_path / "kept.json") is None
