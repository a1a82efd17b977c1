"""Tests of models with random weights: every shape runs, and a step's weights are counted."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    Qwen3_5MoeConfig,
    Qwen3_5MoeForCausalLM,
    Qwen3_5MoeForConditionalGeneration,
)

import tandem
from tandem.bench.generation import WARM_UP_STEPS, Measured, Workload, dense_bytes, measure
from tandem.bench.model_shapes import DENSE_SHAPES, MODEL_SHAPES, ModelShape, find_shape
from tandem.bench.random_model import build_random_model
from tandem.generate.generator import Generator
from tandem.hf.config import OffloadConfig
from tandem.hf.dense import packed_layers
from tandem.hf.packed_layers import PackedLinear
from tests.architecture_sizes import SIZES
from tests.inside import runtime_in

VOCABULARY = 512  # large enough to be packed
WORK = Workload(prompt_tokens=8, new_tokens=2)


def tiny(name: str, **more: Any) -> ModelShape:
    """Return a small version of a shape that keeps its kinds of layers."""
    shape = find_shape(name)
    small = {key: SIZES.get(key, value) for key, value in shape.values.items()}
    heads = min(shape.values["num_key_value_heads"], SIZES["num_attention_heads"])
    return ModelShape(shape.model_type, small | {"num_key_value_heads": heads} | more)


def build(shape: ModelShape, dense_dtype: str = "int8") -> Any:
    return build_random_model(
        shape, OffloadConfig(expert_dtype="int4" if shape.has_experts else "auto", threads=1),
        dense_dtype=dense_dtype, num_layers=4, vocabulary=VOCABULARY,
    )  # fmt: skip


def measured(model: Any, work: Workload = WORK) -> Measured:
    return measure(model, Generator(model), work)


@pytest.mark.parametrize("name", [*MODEL_SHAPES, *DENSE_SHAPES])
def test_four_layers_of_every_shape_generate(name: str) -> None:
    model = build(tiny(name))
    assert model.config.get_text_config().num_hidden_layers == 4
    assert isinstance(model.get_output_embeddings(), PackedLinear)
    assert measured(model).step_bytes > 0


@pytest.mark.parametrize("dense_dtype", ["int8", "none"])
def test_a_head_that_is_tied_to_the_embeddings(dense_dtype: str) -> None:
    shape = tiny("lfm2-8b-a1b")
    assert shape.values["tie_word_embeddings"]
    model = build(shape, dense_dtype)
    head, embeddings = model.get_output_embeddings(), model.get_input_embeddings()
    assert isinstance(head, PackedLinear) == (dense_dtype == "int8")
    assert (head.weight is embeddings.weight) == (dense_dtype == "none")
    assert measured(model).step_bytes > 0


def test_layers_that_share_their_memory_say_what_is_saved_of_them(tmp_path: Path) -> None:
    offload = OffloadConfig(expert_dtype="int4", threads=1)
    model: Any = build_random_model(
        tiny("deepseek-v4-flash"), offload, dense_dtype="fp8", num_layers=4, vocabulary=VOCABULARY,
        is_shared=True,
    )  # fmt: skip
    assert len({layer.buffers.data_ptr() for layer in runtime_in(model).store}) == 1
    weights = {layer.packed.matrix.data.data_ptr() for _, layer in packed_layers(model)}
    assert len(weights) < len([*packed_layers(model)]) / 2
    loaded = tandem.load(tandem.save(model, tmp_path / "packed"), dense_dtype="fp8", threads=1)
    ids = torch.tensor([[40, 41, 50]])
    assert torch.equal(model(ids).logits, loaded(ids).logits)


def test_a_step_reads_and_writes_each_row_s_states() -> None:
    # Every expert is active, so more rows add only their own caches.
    shape = tiny("qwen3.6-35b-a3b", num_experts_per_tok=SIZES["num_experts"])
    one, three = (
        measured(build(shape), Workload(prompt_tokens=8, new_tokens=2, batch=batch)).step_bytes
        for batch in (1, 3)
    )
    heads, width = SIZES["linear_num_value_heads"], SIZES["linear_key_head_dim"]
    states = 3 * heads * width * SIZES["linear_value_head_dim"] * 4  # three layers, fp32
    assert 2 * 2 * states < three - one < 2 * 2 * states * 1.5  # convolutions, keys, values


def test_a_step_reads_all_weights_but_embeddings() -> None:
    # Every expert is active.
    model = build(tiny("qwen3-30b-a3b", num_experts_per_tok=SIZES["num_experts"]), "none")
    embeddings = model.get_input_embeddings().weight
    dense = sum(weight.nbytes for weight in model.parameters()) - embeddings.nbytes
    tokens = WORK.prompt_tokens + WARM_UP_STEPS + WORK.new_tokens
    heads = model.config.num_key_value_heads
    caches = 4 * 2 * heads * SIZES["head_dim"] * 2 * tokens
    assert measured(model).step_bytes == dense + runtime_in(model).store.num_bytes + caches


def test_towers_for_images_are_not_read() -> None:
    config = Qwen3_5MoeConfig()
    with torch.device("meta"):
        whole = Qwen3_5MoeForConditionalGeneration(config)
        text = Qwen3_5MoeForCausalLM(config.text_config)
    assert dense_bytes(whole) == dense_bytes(text)
