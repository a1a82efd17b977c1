"""Tests of the table of released shapes: which exist, what fits, and the rows in the document."""

import argparse
from pathlib import Path

import pytest
from benchmarks.generation import released
from benchmarks.generation.released_shapes import NOT_MEASURED, RELEASED, num_experts, with_experts
from benchmarks.generation.shares import weight_bytes
from benchmarks.generation.systems.setting import ShapeSetting

from tandem.bench.model_shapes import ModelShape
from tandem.bench.peers.setting import Speeds
from tandem.bench.random_model import build_random_model
from tandem.core.errors import ConfigError
from tandem.hf.config import OffloadConfig
from tests.architectures import architectures, build_tiny_model

SETTING = ShapeSetting(
    shape="", layers=1, vocabulary=32_000, threads=1, prompt=8, steps=2, expert_dtype="mxfp4",
    dense_dtype="int8", kv_dtype="auto", gguf=Path(), has_flash_attention=False,
)  # fmt: skip


def test_each_architecture_has_a_shape_or_a_reason() -> None:
    assert RELEASED.keys() | NOT_MEASURED.keys() == set(architectures())
    assert not RELEASED.keys() & NOT_MEASURED.keys()


@pytest.mark.parametrize("name", ["llama4", "minimax_m2", "dbrx"])
def test_a_shape_has_layers_and_experts_of_real_sizes(name: str) -> None:
    shape = RELEASED[name].shape()
    two, four = (weight_bytes(SETTING, shape, layers) for layers in (2, 4))
    hidden, width, experts = {
        "llama4": (5120, 8192, 17),
        "minimax_m2": (3072, 1536, 256),
        "dbrx": (6144, 10_752, 16),
    }[name]  # with the shared ones
    of_layer = experts * 3 * hidden * width * 17 // 32
    assert 0.9 * of_layer < (four - two) / 2 < 1.2 * of_layer


def test_layers_then_experts_are_left_out() -> None:
    shape = RELEASED["phimoe"].shape()
    whole = weight_bytes(SETTING, shape, 4)
    assert released.fitting(shape, whole, SETTING) == (shape, 4)
    found = released.fitting(shape, whole // 3, SETTING)
    assert found is not None
    assert (num_experts(found[0]), found[1]) == (4, 2)
    with pytest.raises(ConfigError, match="how many experts"):
        with_experts(ModelShape("dbrx"), 4)


def test_a_text_model_that_is_a_part_is_built_without_towers() -> None:
    text = build_tiny_model("step3p7").config.get_text_config().to_dict()
    dropped = ("model_type", "architectures", "dtype", "transformers_version")
    values = {key: value for key, value in text.items() if key not in dropped}
    shape = ModelShape("step3p5", values, whole="step3p7")
    options = OffloadConfig(expert_dtype="int4", threads=1)
    model = build_random_model(shape, options, dense_dtype="none", num_layers=2)
    assert model.num_parameters() < 1_000_000


def test_a_row_is_measured_and_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    document = tmp_path / "models.md"
    document.write_text("# Models\n\n## Released shapes\n\n| a |\n|---|\n\n## More\n\n| b |\n")
    speeds = [Speeds(50, 8, 10, 100)]

    def measure(groups: list[dict[str, object]], *_: object) -> dict[str, dict[int, object]]:
        return {name: {0: speeds} for name in groups[0]}

    monkeypatch.setattr(released, "measure_rounds", measure)
    monkeypatch.setattr(released, "DOCUMENT", document)
    options = argparse.Namespace(
        architectures=["olmoe", "cohere2_moe"], write=True, memory=2_600_000_000, vocabulary=512,
        prompt=8, steps=2, rounds=1, threads=1, expert_dtype="mxfp4", dense_dtype="int8",
    )  # fmt: skip
    monkeypatch.setattr(released, "read_options", lambda: options)
    released.main()
    rows = released.rows_in(document.read_text())
    assert rows["olmoe"] == "OLMoE-1B-7B | 4 of 16 layers | 885 MiB | 8.0 | 0.80 | 1.00"
    assert "not tried" in rows["cohere2_moe"]
    assert document.read_text().endswith("\n\n## More\n\n| b |\n")
