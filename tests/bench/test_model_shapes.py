"""Tests of the shapes of released models: their sizes, and cuts with a mix of their layers."""

from typing import Any

import pytest
import torch
from transformers import AutoConfig

from tandem.bench.kernels import SHAPES
from tandem.bench.model_shapes import MODEL_SHAPES, ModelShape, find_shape
from tandem.hf.experts import is_experts_module
from tandem.hf.load import empty_model, keep_first_layers

# Parameters as published, without image towers and MTP layers.
BILLIONS = {
    "qwen3-30b-a3b": 30.5,
    "mixtral-8x7b": 46.7,
    "deepseek-v2-lite": 15.7,
    "deepseek-v4-flash": 284.3,
    "gpt-oss-20b": 20.9,
    "olmoe": 6.9,
    "qwen3.6-35b-a3b": 34.7,
    "qwen3-next-80b-a3b": 79.7,
    "gemma4-26b-a4b": 25.2,
    "lfm2-8b-a1b": 8.3,
    "nemotron-3-nano": 31.6,
    "glm-4.7-flash": 29.9,
}
LISTS = ("layer_types", "layers_block_type")
LISTED = [name for name, shape in MODEL_SHAPES.items() if any(key in shape.values for key in LISTS)]


def config_of(name: str) -> Any:
    shape = find_shape(name)
    config = AutoConfig.for_model(shape.model_type, **shape.values)
    config.dtype = torch.bfloat16
    return config


@pytest.mark.parametrize("name", MODEL_SHAPES)
def test_a_shape_has_the_parameters_of_its_model(name: str) -> None:
    total = sum(parameter.numel() for parameter in empty_model(config_of(name)).parameters())
    assert total / 1e9 == pytest.approx(BILLIONS[name], abs=0.05)


@pytest.mark.parametrize("name", MODEL_SHAPES)
def test_a_config_is_cut_to_its_first_layers_whatever_it_lists_by_layer(name: str) -> None:
    config = config_of(name)
    keep_first_layers(config, 3)
    assert config.num_hidden_layers == 3
    model = empty_model(config)
    assert len(model.get_decoder().layers) == 3
    assert any(is_experts_module(module) for module in model.modules())


@pytest.mark.parametrize("name", SHAPES)
def test_the_kernels_are_timed_on_the_model_s_experts(name: str) -> None:
    values = MODEL_SHAPES[name].values
    width = values.get("moe_intermediate_size") or values["intermediate_size"]
    assert SHAPES[name] == (values["hidden_size"], width)


def kinds(shape: ModelShape) -> list[str]:
    (found,) = [shape.values[key] for key in LISTS if key in shape.values]
    assert len(found) == shape.values["num_hidden_layers"]
    return list(found)


@pytest.mark.parametrize("name", LISTED)
def test_four_layers_are_a_run_with_every_kind(name: str) -> None:
    whole, few = kinds(MODEL_SHAPES[name]), kinds(MODEL_SHAPES[name].sample(4))
    assert set(few) == set(whole)
    assert few in [whole[first : first + 4] for first in range(len(whole))]


@pytest.mark.parametrize("name", MODEL_SHAPES)
def test_more_layers_than_there_are_change_nothing(name: str) -> None:
    shape = MODEL_SHAPES[name]
    assert shape.sample(1000) == shape.cut(1000) == shape


def test_of_runs_with_as_many_kinds_the_commonest_is_taken() -> None:
    kinds = MODEL_SHAPES["deepseek-v4-flash"].sample(2).kinds
    assert kinds == [
        ("heavily_compressed_attention", "moe"), ("compressed_sparse_attention", "moe"),
    ]  # fmt: skip


def test_the_first_layers_are_taken_where_all_are_alike() -> None:
    shape = ModelShape("any", {"num_hidden_layers": 6, "ranks": [1, 1, 2, 2, 2, 2], "sizes": [7]})
    assert shape.sample(2).values == {"num_hidden_layers": 2, "ranks": [1, 2], "sizes": [7]}
    assert shape.cut(2).values["ranks"] == [1, 1]
    assert MODEL_SHAPES["qwen3-30b-a3b"].sample(2).values["num_hidden_layers"] == 2


def test_what_differs_by_layer_keeps_its_layer() -> None:
    own = {"1": {"head_dim": 8}, "3": {"head_dim": 16}}
    shape = ModelShape("any", {"num_hidden_layers": 4, "per_layer_config": own})
    assert shape.cut(2, first=1).values["per_layer_config"] == {0: {"head_dim": 8}}
