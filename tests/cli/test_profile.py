"""`tandem profile`: measured on first use, kept, read again, drawn."""

import json
import os
from pathlib import Path

import pytest

import tandem
from tandem.core.errors import TandemWarning
from tandem.hf.machine.profile import kept_profile
from tandem.policy.cost import HardwareProfile
from tests import programs
from tests.hf.tiny import save_tiny_checkpoint
from tests.inside import runtime_in
from tests.programs import ENVIRONMENT


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_checkpoint(tmp_path_factory.mktemp("models") / "tiny")


def test_a_profile_is_measured_kept_and_drawn(model: Path, tmp_path: Path) -> None:
    words = ["profile", str(model), "--json", "--expert-dtype", "int8"]
    words += ["--picture", str(tmp_path / "curves.svg")]
    done = programs.tandem(*words, env={**ENVIRONMENT, "TANDEM_CACHE": str(tmp_path)})
    assert done.returncode == 0, done.stderr
    (kept,) = (tmp_path / "profiles").iterdir()
    printed = done.stdout.splitlines()[-1]
    assert json.loads(printed) == json.loads(kept.read_text())
    profile = HardwareProfile.from_json(printed, where="printed")
    (shape,) = profile.shapes
    assert (shape.num_moe_layers, shape.num_experts, shape.top_k) == (4, 8, 2)
    assert all(a <= b for a, b in zip(shape.cpu_seconds, shape.cpu_seconds[1:], strict=False))
    assert (tmp_path / "curves.svg").read_text().startswith("<svg ")


def test_a_kept_profile_is_read_and_another_format_is_measured(model: Path, tmp_path: Path) -> None:
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


def test_a_damaged_profile_is_measured_again_and_that_is_said(model: Path, tmp_path: Path) -> None:
    words = ["profile", str(model), "--expert-dtype", "int8"]
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
