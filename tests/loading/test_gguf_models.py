"""Tests of files by llama.cpp's own converter: Transformers' answers before the conversion.

`make_gguf_files` wrote them. All their weights are exact in Q8_0, and DeepSeek-V4's experts in
MXFP4.
"""

import dataclasses
import lzma
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import tandem
from tandem.bench.random_model import empty_model_of
from tandem.checkpoint.sources.gguf_header import read_header
from tandem.checkpoint.sources.gguf_models import ARCHITECTURES
from tandem.checkpoint.sources.source import Source
from tandem.core.errors import ModelError, UnsupportedModelError
from tandem.forecast.sizes import model_sizes
from tandem.forecast.speed_forecast import cut_shape
from tandem.generate.generator import Generator
from tandem.hf.checkpoint import open_model
from tandem.hf.config import OffloadConfig
from tandem.hf.dense import packed_layers
from tandem.hf.load import is_widened_on
from tandem.hf.packed_layers import PackedEmbedding
from tandem.recording.coverage import coverage_of
from tests.inside import runtime_in
from tests.loading.make_gguf_files import DATA, DENSE_MODELS, EXPECTED, MODELS, answers


def unpacked(name: str, directory: Path) -> Path:
    """Return the path of an unpacked file of `make_gguf_files`."""
    file = directory / f"{name}.gguf"
    file.write_bytes(lzma.decompress((DATA / f"{name}.gguf.xz").read_bytes()))
    return file


def difference(model: object, name: str) -> float:
    """Return the relative difference of a model's logits from Transformers'."""
    expected = load_file(EXPECTED)[name]
    return ((answers(model) - expected).norm() / expected.norm()).item()


@pytest.mark.parametrize("name", MODELS)
def test_answers_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    file = unpacked(name, tmp_path)
    # Without rounded activations, so that a tolerance hides nothing.
    model = tandem.load(file, dtype="fp32", expert_dtype="fp32")
    assert difference(model, name) < 1e-4
    model = tandem.load(file, dtype="fp32", dense_dtype="auto")
    fmt = "mxfp4" if name == "deepseek4" else "int8-g32"
    assert {layer.layout.format_name for layer in runtime_in(model).store} == {fmt}
    assert difference(model, name) < 0.5  # near ties of routers and indexers; wrong weights give 1


@pytest.mark.parametrize("name", DENSE_MODELS)
def test_answers_without_experts_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    file = unpacked(name, tmp_path)
    assert difference(tandem.load(file, dtype="fp32", threads=1), name) < 1e-4
    model = tandem.load(file, dense_dtype="auto", threads=1)
    assert (model.dtype, len(runtime_in(model).store)) == (torch.float32, 0)
    assert {layer.packed.matrix.format.name for _, layer in packed_layers(model)} == {"int8-g32"}
    assert difference(model, name) < 0.05
    generator = Generator(model)
    generator.generate([40, 41, 42], max_new_tokens=6, temperature=0)
    assert generator.recorded_graph is not None, generator.why_slower


def test_a_file_without_experts_is_planned_and_saved(tmp_path: Path) -> None:
    file = unpacked("qwen3", tmp_path)
    sizes = model_sizes(open_model(file), OffloadConfig(dense_dtype="auto"))
    assert (sizes.is_dense, sizes.dense_format, sizes.dense_layers_without) == (True, "int8-g32", 0)
    # Plain numbers take as many bytes as in the file, not twice as many.
    assert not is_widened_on(OffloadConfig(dense_dtype="auto"), Source("gguf", {}, {}))
    loaded = tandem.load(file, dtype="bfloat16", dense_dtype="auto", threads=1)
    model = tandem.load(tandem.save(loaded, tmp_path / "packed"), threads=1)
    assert {layer.packed.matrix.format.name for _, layer in packed_layers(model)} == {"int8-g32"}
    assert difference(model, "qwen3") < 0.05


def test_factors_of_positions_that_are_not_llama_3s_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    header = read_header(unpacked("llama", tmp_path))
    fields = {**header.fields, "llama.rope.freq_base": 1e4}
    damaged = dataclasses.replace(header, fields=fields)
    monkeypatch.setattr("tandem.checkpoint.sources.gguf.read_header", lambda file: damaged)
    with pytest.raises(UnsupportedModelError, match="factors that are not its model's"):
        tandem.load(damaged.file)


@pytest.mark.parametrize("name", ["qwen35moe", "gemma4"])
def test_decode_steps_read_rows_and_gather_inputs_natively(name: str, tmp_path: Path) -> None:
    model = tandem.load(unpacked(name, tmp_path), dense_dtype="auto", threads=1)
    assert isinstance(model.get_input_embeddings(), PackedEmbedding)
    orders = [layer.input_order is not None for _, layer in packed_layers(model)]
    assert any(orders) == (name == "qwen35moe")
    generator = Generator(model)
    generator.generate([40, 41, 42], max_new_tokens=6, temperature=0)
    assert generator.recorded_graph is not None, generator.why_slower
    coverage = coverage_of(generator.recorded_graph)
    assert coverage.num_calls == 1
    assert coverage.native["rows"] == 1 + (name == "gemma4")  # which has embeddings of layers


@pytest.mark.parametrize(
    ("key", "value"),
    [("ssm.time_step_rank", 0), ("ssm.inner_size", "wide"), ("attention.head_count", None)],
)
def test_metadata_that_make_no_config(
    key: str, value: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    header = read_header(unpacked("qwen35moe", tmp_path))
    fields = {**header.fields, f"qwen35moe.{key}": value}
    damaged = dataclasses.replace(header, fields=fields)
    monkeypatch.setattr("tandem.checkpoint.sources.gguf.read_header", lambda file: damaged)
    with pytest.raises(ModelError, match=r"qwen35moe.*download it again"):
        tandem.load(damaged.file)


def test_layers_in_an_order_that_no_config_of_a_jamba_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    header = read_header(unpacked("jamba", tmp_path))
    attention = header.tensors["blk.1.attn_q.weight"]
    tensors = {**header.tensors, "blk.2.attn_q.weight": attention}
    damaged = dataclasses.replace(header, tensors=tensors)
    monkeypatch.setattr("tandem.checkpoint.sources.gguf.read_header", lambda file: damaged)
    with pytest.raises(ModelError, match=r"attention at \[1, 2, 3\].*download it again"):
        tandem.load(damaged.file)


def test_factors_of_frequencies_that_are_not_llama_4s(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    header = read_header(unpacked("llama4", tmp_path))
    factors = header.tensors["rope_freqs.weight"]
    assert sorted(set(factors.data.tolist())) == [1.0, 16.0]
    other = dataclasses.replace(factors, data=factors.data[::-1])
    tensors = {**header.tensors, "rope_freqs.weight": other}
    damaged = dataclasses.replace(header, tensors=tensors)
    monkeypatch.setattr("tandem.checkpoint.sources.gguf.read_header", lambda file: damaged)
    with pytest.raises(ModelError, match="factors that are not its model's"):
        tandem.load(damaged.file)


@pytest.mark.parametrize(
    ("key", "value", "sentence"),
    [
        ("attention.sliding_window_pattern", [0, 1], "for 2 layers, expected 4"),
        ("attention.sliding_window", 0, "does not say its sliding_window"),
        ("attention.head_count", 4, r"q_proj.weight of shape \(128, 64\)"),
        ("swiglu_clamp_exp", [7.0], "swiglu_clamp_exp for 1 layers, expected 4"),
        ("rope.dimension_count", 0, "rope.dimension_count is 0, expected a multiple of 4 up to 16"),
        ("rope.dimension_count_swa", 64, "rope.dimension_count_swa is 64, expected a multiple"),
        ("rope.freq_base_swa", 0.0, "rope.freq_base_swa is 0.0, expected a number above 0"),
        ("rope.freq_base", 1e4, "factors that are not its model's"),
        ("expert_gating_func", 1, "weighs experts in another way than Step-3.7"),
        ("expert_weights_norm", False, "weighs experts in another way than Step-3.7"),
    ],
)
def test_metadata_that_make_no_step35(
    key: str, value: object, sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    header = read_header(unpacked("step35", tmp_path))
    fields = {**header.fields, f"step35.{key}": value}
    damaged = dataclasses.replace(header, fields=fields)
    monkeypatch.setattr("tandem.checkpoint.sources.gguf.read_header", lambda file: damaged)
    with pytest.raises(ModelError, match=sentence):
        tandem.load(damaged.file, dtype="fp32")


def test_a_step35_packed_answers_to_the_bit(tmp_path: Path) -> None:
    file = unpacked("step35", tmp_path)
    shape = cut_shape(model_sizes(open_model(file), OffloadConfig()), 2)
    assert type(empty_model_of(shape)).__name__ == "Step3p5ForCausalLM"  # which a plan measures
    model = tandem.load(file, dense_dtype="auto", threads=1)
    again = tandem.load(tandem.save(model, tmp_path / "packed"), threads=1)
    assert torch.equal(answers(again), answers(model))


def test_every_architecture_has_a_file() -> None:
    older = {
        "qwen2moe",
        "qwen3moe",
        "qwen3vlmoe",
        "minimax-m2",
        "olmoe",
        "gpt-oss",
        "glm4moe",
    }
    made = {name.partition(" ")[0] for name in (*MODELS, *DENSE_MODELS)}
    assert older | {"deepseek2"} | made == set(ARCHITECTURES)
