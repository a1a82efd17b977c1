"""Tests that a demo model is complete or absent after kills, races, lost files and full disks."""

import dataclasses
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from tandem.checkpoint.packed import INDEX_FILE
from tandem.cli.model_choice import ModelChoice, load_model
from tandem.core.errors import BuildError, ConfigError, ModelError
from tandem.demo import RECIPE, ensure_demo_model, is_demo_model, verify_demo_model
from tandem.demo.store import MANIFEST, ensure_built, is_ready
from tandem.devices.options import OffloadOptions
from tests.demo.tiny import TINY, build_tiny, tiny_dense

ROOT = Path(__file__).parent.parent.parent


def start_build(models: Path, *options: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-m", "tests.demo.tiny", str(models), *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )


@contextmanager
def files_up_to(num_bytes: int) -> Iterator[None]:
    """Limit the size of files that this process may write, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


def write_a_file(directory: Path) -> None:
    (directory / "weights").write_text("abc")


def must_not_build(directory: Path) -> None:
    pytest.fail(f"{directory} was built again")


def leftovers(models: Path) -> list[Path]:
    return list(models.glob(".building-*"))


@pytest.mark.parametrize(
    "stage",
    [pytest.param("calibrate", marks=pytest.mark.slow), "write"],  # nothing is written yet, some is
)
def test_killed_build_leaves_nothing_that_looks_ready(tmp_path: Path, stage: str) -> None:
    with start_build(tmp_path, "--stop-at", stage) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "building\n"
        assert process.stdout.readline() == f"at {stage}\n"
        process.kill()
    assert not (tmp_path / "demo-equal").exists()
    assert len(leftovers(tmp_path)) == 1

    directory = build_tiny(tmp_path)

    verify_demo_model(directory)
    assert leftovers(tmp_path) == []


def test_concurrent_builds_build_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with start_build(tmp_path) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "building\n"
        directory = build_tiny(tmp_path)  # waits for the other process
        assert (process.communicate(timeout=120)[0], process.returncode) == ("", 0)
    assert capsys.readouterr().out == ""
    verify_demo_model(directory)


def test_full_disk_is_one_sentence(tmp_path: Path) -> None:
    with files_up_to(100_000), pytest.raises(BuildError) as raised:
        build_tiny(tmp_path)
    assert str(raised.value).startswith("the demo model could not be written to")
    assert "\n" not in str(raised.value)
    assert leftovers(tmp_path) == []


def test_cache_that_is_a_file_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "models").write_text("")
    with pytest.raises(BuildError, match=r"could not be written .* set TANDEM_CACHE"):
        ensure_demo_model("demo", cache_dir=tmp_path)


def test_unknown_kind_names_the_near_ones(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="did you mean 'demo-equal'"):
        ensure_demo_model("demo-equl", cache_dir=tmp_path)


def test_failed_build_leaves_nothing(tmp_path: Path) -> None:
    def fail(directory: Path) -> None:
        write_a_file(directory)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        ensure_built(tmp_path, kind="demo", recipe=RECIPE, build=fail)
    assert [path.name for path in tmp_path.iterdir()] == [".lock"]


def test_ready_build_is_not_built_again(tmp_path: Path) -> None:
    first = ensure_built(tmp_path, kind="demo", recipe=RECIPE, build=write_a_file)
    second = ensure_built(tmp_path, kind="demo", recipe=RECIPE, build=must_not_build)
    assert second == first == tmp_path / "demo"


@pytest.mark.parametrize("damage", ["lose", "truncate", "manifest", "version"])
def test_damaged_or_outdated_build_is_built_again(tmp_path: Path, damage: str) -> None:
    directory = ensure_built(tmp_path, kind="demo", recipe=RECIPE, build=write_a_file)
    recipe = RECIPE
    match damage:
        case "lose":
            (directory / "weights").unlink()
        case "truncate":
            (directory / "weights").write_text("a")
        case "manifest":
            (directory / MANIFEST).write_text("{")
        case "version":
            recipe = dataclasses.replace(RECIPE, version=RECIPE.version + 1)
    assert not is_ready(directory, kind="demo", recipe=recipe)

    ensure_built(tmp_path, kind="demo", recipe=recipe, build=write_a_file)

    assert is_ready(directory, kind="demo", recipe=recipe)
    assert leftovers(tmp_path) == []


def test_changed_content_of_the_same_size_fails_the_full_check(tmp_path: Path) -> None:
    directory = ensure_built(tmp_path, kind="demo", recipe=RECIPE, build=write_a_file)
    (directory / "weights").write_text("abd")
    with pytest.raises(ModelError, match=r"weights: .* expected sha256 .* delete"):
        verify_demo_model(directory)


def test_a_command_that_verifies_reads_the_manifest_of_a_demo_model(tmp_path: Path) -> None:
    directory = ensure_built(tmp_path, kind="demo", recipe=RECIPE, build=write_a_file)
    (directory / "weights").write_text("abd")
    choice = ModelChoice(model=str(directory), verify=True)
    with pytest.raises(ModelError, match=r"weights: .* expected sha256 .* delete"):
        load_model(choice, OffloadOptions(), quiet=True)
    (directory / INDEX_FILE).write_text("{}")  # a packed copy has the manifest too
    assert not is_demo_model(directory)


def test_equal_experts_reproduce_the_dense_model(tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(build_tiny(tmp_path), dtype=torch.float32)
    ids = torch.arange(60).view(2, 30)
    with torch.inference_mode():
        actual, expected = model(ids).logits, tiny_dense().model(ids).logits
    torch.testing.assert_close(actual, expected)


def test_differences_have_the_rank_and_norm_of_the_recipe(tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(
        build_tiny(tmp_path, kind="demo"), dtype=torch.float32
    )
    dense = tiny_dense().model.model.layers[0].mlp.down_proj.weight
    difference = model.model.layers[0].mlp.experts.down_proj - dense
    norms = difference.norm(dim=(1, 2)) / dense.norm()
    torch.testing.assert_close(norms, torch.full((8,), TINY.difference_norm), rtol=0.01, atol=0)
    spectrum = torch.linalg.svdvals(difference)  # beyond the rank there is only bfloat16's rounding
    assert (spectrum[:, TINY.difference_rank] < 0.2 * spectrum[:, 0]).all()
    assert torch.pdist(difference.flatten(1)).min() > 0


def test_same_recipe_gives_the_same_bytes(tmp_path: Path) -> None:
    first, second = (build_tiny(tmp_path / name, kind="demo") for name in ("a", "b"))
    assert (first / MANIFEST).read_text() == (second / MANIFEST).read_text()
