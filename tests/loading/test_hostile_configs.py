"""Tests of configs with false sizes or code: one sentence each, without memory or time."""

import dataclasses
import sys
from pathlib import Path
from typing import Any

import pytest

import tandem
from tandem.checkpoint.sources.gguf_header import read_header
from tandem.core.errors import ModelError
from tandem.forecast.completeness import require_complete
from tandem.forecast.sizes import model_sizes
from tandem.hf.checkpoint import open_model
from tests.hf.tiny import edit_json
from tests.loading.gguf_files import tiny_model, write_gguf

CONFIG = "config.json"


def lying_file(
    directory: Path, patch: pytest.MonkeyPatch, fields: dict[str, Any], *tensors: str
) -> Path:
    """Return a GGUF file with changed header fields and additional tensors."""
    file = write_gguf(directory / "tiny.gguf", tiny_model(), "Q4_0")
    header = read_header(file)
    more = dict.fromkeys(tensors, next(iter(header.tensors.values())))
    lying = dataclasses.replace(
        header, fields={**header.fields, **fields}, tensors={**header.tensors, **more}
    )
    patch.setattr("tandem.checkpoint.sources.gguf.read_header", lambda file: lying)
    return file


@pytest.mark.parametrize("value", [2, 40, 1 << 20, 1 << 60, 1 << 70])
def test_more_layers_than_tensors_name(checkpoint: Path, value: int) -> None:
    edit_json(checkpoint / CONFIG, num_hidden_layers=value)
    with pytest.raises(ModelError, match=f"num_hidden_layers is {value}, and the .*tensors"):
        tandem.load(checkpoint)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("num_attention_heads", 1_000_003),
        ("num_key_value_heads", 1_000_003),
        ("head_dim", 1_000_004),
        ("vocab_size", 1_000_003),
        ("intermediate_size", 1_000_003),
        ("num_local_experts", 1_000_003),
        ("hidden_size", 1 << 30),
    ],
)
def test_a_model_larger_than_its_tensors(checkpoint: Path, name: str, value: int) -> None:
    """It also holds with `auto_map`, which names code that must not run here."""
    for more in ({}, {"auto_map": {"AutoConfig": "mine.Config"}}):
        edit_json(checkpoint / CONFIG, **{name: value}, **more)
        with pytest.raises(ModelError, match=f"{name} {value}"):
            tandem.load(checkpoint)


def test_large_numbers_that_are_published(checkpoint: Path) -> None:
    rope = {"rope_type": "default", "rope_theta": 45_400_000_000}
    edit_json(checkpoint / CONFIG, rope_parameters=rope, model_max_length=10**30)
    assert tandem.load(checkpoint).config.rope_parameters["rope_theta"] == 45_400_000_000


def test_a_plan_of_sizes_that_no_tensor_has(checkpoint: Path) -> None:
    edit_json(checkpoint / CONFIG, num_attention_heads=1_000_003)
    with pytest.raises(ModelError, match="num_attention_heads 1000003"):
        model_sizes(open_model(checkpoint), tandem.OffloadConfig())


def test_a_quantization_config_of_other_types(checkpoint: Path) -> None:
    edit_json(checkpoint / CONFIG, quantization_config={"quant_method": "gptq", "bits": "x"})
    with pytest.raises(ModelError, match="has a quantization_config that cannot be read"):
        require_complete(open_model(checkpoint))


KEYS = (
    "attn_implementation", "_attn_implementation", "experts_implementation",
    "_experts_implementation",
)  # fmt: skip
KERNELS = ("evil/kernel", {"": "evil/kernel@main:run"}, {"text_config": "evil/kernel"})
FETCHED = {
    "transformers_weights": "other.safetensors",
    "configuration_files": ["config.5.0.0.json"],
    "distributed_config": {"tp_size": 2},
    "use_kernels": True,
    "kernel_config": {"x": 1},
    "use_pretrained_backbone": True,
    "architecture": "hf-hub:evil/model",
}
NO_DTYPES: list[object] = [5, [], "float7", {"text_config": 5}]
NO_NAMES: list[object] = [5, [], {}, True, "m" * 10_000, "\0"]
# What config.json says in place of what it said, and what is answered.
LIES: list[tuple[dict[str, Any], str]] = [
    ({"index_topk": -1}, "index_topk is -1, expected"),
    ({"hidden_size": "big"}, "hidden_size is 'big', expected a whole number from 1"),
    ({"num_hidden_layers": -2}, "num_hidden_layers is -2, expected a whole number from 1"),
    ({"num_key_value_heads": 0}, "num_key_value_heads is 0, expected a whole number from 1"),
    ({"attention_chunk_size": 0}, "attention_chunk_size is 0, expected a whole number from 1"),
    (
        {"text_config": {"sparse_attention_config": {"sparse_block_size": 0}}},
        "sparse_block_size is 0, expected a whole number from 1",
    ),
    (
        {"ffn_config": {"moe_num_experts": 4, "moe_top_k": 9}},
        "moe_top_k is 9 and moe_num_experts is 4, expected 1 to 4 experts a token",
    ),
    ({"num_experts_per_tok": 99}, "is 99 and num_local_experts is 8, expected 1 to 8 experts"),
    ({"num_experts_per_tok": 0}, "is 0 and num_local_experts is 8, expected 1 to 8 experts"),
    ({"num_local_experts": 0}, "is 2 and num_local_experts is 0, expected 0 to 0 experts"),
    ({"hidden_act": "sillu"}, "'sillu', which Transformers does not know; did you mean 'silu'"),
    ({"hidden_act": 7}, "config.json is not a config of mixtral: .*'hidden_act'.* got int"),
    ({"rms_norm_eps": "x"}, "config.json is not a config of mixtral: .*'rms_norm_eps'.* got str"),
    ({"max_position_embeddings": 1 << 60}, "max_position_embeddings is 1152921504606846976, expe"),
    ({"rope_parameters": {"x": [1 << 60]}}, "x is 1152921504606846976, expected at most"),
    *(
        ({key: value}, f"{key} is .*, expected a dtype such as bfloat16")
        for key in ("dtype", "torch_dtype")
        for value in NO_DTYPES
    ),
    *(
        (change, f"{key} 'evil/kernel.* fetch from the hub and run")
        for key in KEYS
        for value in KERNELS
        for change in ({key: value}, {"vision_config": {"deeper": [{key: value}]}})
    ),
    *(
        (change, f"{key}.*with which Transformers would")
        for key, value in FETCHED.items()
        for change in ({key: value}, {"vision_config": {key: value}})
    ),
    *(
        ({key: 5}, f"key '{key}', which is a method")
        for key in ("get_text_config", "to_dict", "__class__", "update")
    ),
    *(({"model_type": value}, "model_type") for value in NO_NAMES),
]


@pytest.mark.parametrize(("changes", "sentence"), LIES)
def test_a_config_that_lies(checkpoint: Path, changes: dict[str, Any], sentence: str) -> None:
    edit_json(checkpoint / CONFIG, **changes)
    with pytest.raises(ModelError, match=sentence):
        open_model(checkpoint)


@pytest.mark.parametrize("value", ["flash_attention_2", "deepgemm", "sonicmoe", "nonsense"])
@pytest.mark.parametrize("key", KEYS)
def test_implementations_are_not_for_a_config_to_choose(
    checkpoint: Path, key: str, value: str
) -> None:
    """Transformers would download some implementations from the hub."""
    edit_json(checkpoint / CONFIG, **{key: value})
    model = tandem.load(checkpoint)
    assert model.config._attn_implementation in ("sdpa", "eager")
    tandem.Generator(model).generate([5, 6], max_new_tokens=1)


def test_an_mtp_layers_directory_brings_no_code(checkpoint: Path, tmp_path: Path) -> None:
    """The user allowed no code, so an MTP layer's directory must not run any."""
    from tandem.decode.mtp.loading import load_mtp

    model = tandem.load(checkpoint)
    edit_json(
        checkpoint / CONFIG,
        auto_map={"AutoConfig": "evil.Config"},
        quantization_config={"quant_method": "gptq", "bits": 4},
    )
    mark = tmp_path / "has run"
    (checkpoint / "evil.py").write_text(f"open({str(mark)!r}, 'w').close()\nclass Config: pass\n")
    with pytest.raises(ModelError):
        load_mtp(model, checkpoint)
    assert not mark.exists()
    assert not any(name.startswith("transformers_modules") for name in sys.modules)


@pytest.mark.parametrize(
    ("key", "value", "sentence"),
    [
        ("attention.head_count", 1_000_003, "num_attention_heads 1000003"),
        ("attention.head_count", 0, "num_attention_heads is 0, expected a whole number from 1"),
        ("expert_used_count", 1_000_003, "num_experts_per_tok is 1000003 and num_local_experts"),
        ("attention.key_length", 1_000_004, "head_dim 1000004"),
        ("block_count", 1 << 60, "block_count is 1152921504606846976, expected whole numbers"),
        ("block_count", -1, "block_count is -1, expected whole numbers"),
        ("block_count", "two", "block_count is 'two', expected whole numbers"),
        ("context_length", [1.5], r"context_length is \[1\.5\], expected whole numbers"),
        ("rope.freq_base", float("nan"), "freq_base is nan, expected a finite number"),
        ("rope.freq_base", "x", "freq_base is 'x', expected a finite number"),
        ("rope.scaling.type", 5, "rope.scaling.type is 5, expected a text"),
    ],
)
def test_metadata_of_gguf_that_lie(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str, value: object, sentence: str
) -> None:
    file = lying_file(tmp_path, monkeypatch, {f"qwen3moe.{key}": value})
    with pytest.raises(ModelError, match=sentence):
        tandem.load(file)


def test_a_tensor_of_a_layer_far_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fields = {"qwen3moe.block_count": 1_000_000_000}
    file = lying_file(tmp_path, monkeypatch, fields, "blk.999999999.x")
    with pytest.raises(ModelError, match="names a tensor of layer 999999999, and has"):
        tandem.load(file)
