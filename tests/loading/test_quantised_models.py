"""Tests of tiny models in every quantised format: codes are kept, answers match the values."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

import tandem
from tandem.core.errors import ModelError, UnsupportedModelError
from tandem.experts.store.packed_layer import PackedLayer
from tests.hf.tiny import edit_json
from tests.inside import logits_of, relative_error, runtime_in
from tests.loading.checkpoints import (
    FORMATS,
    Format,
    gptq,
    row_fp8,
    write_decoded,
    write_quantised,
)

pytestmark = pytest.mark.seam
EXPERT_FORMATS = {
    "gptq": "int4-g32", "gptq-zeros": "int4z-g32", "gptq-order": "int4-g32", "awq": "int4z-g32",
    "packed-int4": "int4-g32", "packed-int8": "int8-g32", "fp8": "fp8",
    "nvfp4": "nvfp4", "modelopt-nvfp4": "nvfp4",
}  # fmt: skip


@pytest.mark.parametrize("name", FORMATS)
def test_answers_are_those_of_the_decoded_weights(
    name: str, quantised: dict[str, Path], tmp_path: Path
) -> None:
    decoded = write_decoded(tmp_path / "decoded", quantised[name])
    model = tandem.load(quantised[name], dtype="fp32")
    layers = list(runtime_in(model).store)
    assert all(isinstance(x, PackedLayer) for x in layers)
    assert {x.layout.format.name for x in layers} == {EXPERT_FORMATS[name]}
    expected = logits_of(AutoModelForCausalLM.from_pretrained(decoded, dtype=torch.float32))
    # The kernels round activations to int8; another order of inputs or experts gives about 1.
    assert relative_error(logits_of(model), expected) < 0.03
    dense = AutoModelForCausalLM.from_pretrained(decoded, dtype=torch.float32).state_dict()
    for parameter, value in model.state_dict().items():
        if "experts." not in parameter or "shared_experts" in parameter:
            assert torch.equal(value, dense[parameter]), parameter


@pytest.mark.parametrize("name", ["gptq", "gptq-order", "fp8"])
def test_saved_and_loaded_again_it_is_the_same(
    name: str, quantised: dict[str, Path], tmp_path: Path
) -> None:
    model = tandem.load(quantised[name])
    packed = tandem.save(model, tmp_path / "packed")
    again = AutoModelForCausalLM.from_pretrained(packed)
    assert torch.equal(logits_of(again), logits_of(model))


def test_experts_are_the_checkpoints_codes(quantised: dict[str, Path], tmp_path: Path) -> None:
    packed = quantised["packed-int4"]
    values = load_file(write_decoded(tmp_path / "d", packed) / "model.safetensors")
    store = runtime_in(tandem.load(packed)).store
    for layer in store:
        for expert in range(layer.arrivals.num_experts):
            prefix = f"{layer.arrivals.name}.{expert}"
            weights = layer.weights(expert)
            parts = [values[f"{prefix}.{part}_proj.weight"] for part in ("gate", "up")]
            assert torch.equal(weights.up, torch.cat(parts))
            assert torch.equal(weights.down, values[f"{prefix}.down_proj.weight"])


def test_a_named_dtype_rounds_the_values(quantised: dict[str, Path], tmp_path: Path) -> None:
    decoded = write_decoded(tmp_path / "decoded", quantised["awq"])
    model = tandem.load(quantised["awq"], expert_dtype="bf16", dtype="fp32")
    expected = tandem.load(decoded, expert_dtype="bf16", dtype="fp32")
    assert torch.equal(logits_of(model), logits_of(expected))


def test_codes_without_a_format_name_an_expert_dtype(
    plain: dict[str, Path], tmp_path: Path
) -> None:
    fmt = Format(row_fp8, {"quant_method": "fp8"})
    quantised = write_quantised(tmp_path / "q", plain["qwen3_moe"], fmt)
    with pytest.raises(UnsupportedModelError, match=r"a scale for each row.*give an expert_dtype"):
        tandem.load(quantised)
    decoded = write_decoded(tmp_path / "decoded", quantised)
    expected = logits_of(AutoModelForCausalLM.from_pretrained(decoded, dtype=torch.float32))
    found = logits_of(tandem.load(quantised, expert_dtype="int8-g32", dtype="fp32"))
    assert relative_error(found, expected) < 0.03


@pytest.mark.parametrize("name", ["gptq", "awq", "fp8", "packed-int4"])
def test_from_pretrained_refuses_a_second_method_in_its_own_words(
    name: str, quantised: dict[str, Path]
) -> None:
    if name == "packed-int4":  # Transformers wants the library even to read the config
        pytest.importorskip("compressed_tensors")
    with pytest.raises(ValueError, match=r"is quantized with .* passing a OffloadConfig"):
        AutoModelForCausalLM.from_pretrained(
            quantised[name], quantization_config=tandem.OffloadConfig(expert_dtype="int4")
        )


def with_nan(weight: Tensor) -> dict[str, Tensor]:
    tensors = FORMATS["gptq"].write(weight)
    tensors["scales"][0, 0] = float("nan")
    return tensors


def in_random_order(weight: Tensor) -> dict[str, Tensor]:
    return gptq(weight, order=torch.randperm(weight.shape[1]))


GPTQ = FORMATS["gptq"]


@pytest.mark.parametrize(
    ("fmt", "sentence"),
    [
        (Format(with_nan, GPTQ.config), r"scales hold NaN or infinity.*download"),
        (
            Format(GPTQ.write, GPTQ.config | {"group_size": 48}),
            r"groups of 48 of 32 inputs; use the config",
        ),
        (
            Format(in_random_order, FORMATS["gptq-order"].config),
            r"gate_proj.*up_proj.* order their inputs differently",
        ),
    ],
)
def test_codes_that_cannot_be_taken_over(
    fmt: Format, sentence: str, plain: dict[str, Path], tmp_path: Path
) -> None:
    directory = write_quantised(tmp_path / "q", plain["qwen3_moe"], fmt)
    with pytest.raises(ModelError, match=sentence):
        tandem.load(directory)
    if fmt.write is in_random_order:
        tandem.load(directory, expert_dtype="int8")


def test_activation_order_on_a_device_and_in_recorded_steps(
    quantised: dict[str, Path], tmp_path: Path
) -> None:
    prompt = [[40, 41, 42, 43, 44]]
    answers = []
    choices: list[dict[str, Any]] = [{}, {"device": "emulated", "gpu_memory": "60KB"}]
    for options in choices:
        model = tandem.load(
            quantised["gptq-order"], dtype="fp32", cache_dir=str(tmp_path), **options
        )
        for has_replay in (True, False):
            generator = tandem.Generator(model, has_replay=has_replay)
            (answer,) = generator.generate(prompt, max_new_tokens=12)
            answers.append(answer.token_ids)
        runtime_in(model).executor.close()
    assert all(tokens == answers[0] for tokens in answers)


@pytest.mark.parametrize("dense_dtype", ["none", "auto", "int8"])
def test_matrices_of_another_shape_than_the_config_says(
    dense_dtype: str, plain: dict[str, Path], tmp_path: Path
) -> None:
    quantised = write_quantised(tmp_path / "quantised", plain[GPTQ.architecture], GPTQ)
    edit_json(quantised / "config.json", head_dim=48)
    sentence = r"proj\.weight of shape .*, but config\.json asks for"
    with pytest.raises(ModelError, match=sentence):
        tandem.load(quantised, dense_dtype=dense_dtype)
