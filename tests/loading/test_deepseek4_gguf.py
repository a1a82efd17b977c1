"""Tests of DeepSeek-V4 in GGUF in the published types: the converter's file in other types.

`test_gguf_models` tests names and metadata with the converter's own file. The MTP layer has its own
file, as the converter writes it.
"""

import dataclasses
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFWriter
from gguf.quants import dequantize
from safetensors.torch import load_file
from torch import Tensor

import tandem
from tandem.checkpoint.sources.gguf import config_of
from tandem.checkpoint.sources.gguf_header import read_header
from tandem.checkpoint.sources.gguf_models import ARCHITECTURES
from tandem.checkpoint.sources.gguf_mtp import find_mtp, mtp_source
from tandem.core.errors import ModelError, TandemWarning, UnsupportedModelError
from tandem.decode.cpu_slots import CpuSlotPool
from tandem.decode.mtp.loading import load_mtp
from tandem.generate.generator import Generator
from tandem.hf.dense import packed_layers
from tests.architectures import build_tiny_model
from tests.conftest import two_threads
from tests.inside import relative_error, runtime_in
from tests.loading.gguf_files import quantised_blocks
from tests.loading.make_gguf_files import EXPECTED, MODELS, MTP, TOKENS, answers, mtp_streams
from tests.loading.test_gguf_models import unpacked

# By the names of tensors: the converter's, of FP8; small experts beside 16 bits; llama-quantize's.
KINDS = {
    "MXFP4_MOE": {"_exps": "MXFP4", "": "Q8_0"},
    "IQ2_XXS": {"ffn_down_exps": "Q2_K", "_exps": "IQ2_XXS", "": "F16"},
    "Q4_K_M": {"ffn_down_exps": "Q6_K", "output.": "Q6_K", "": "Q4_K"},
}
EXPERTS = {"MXFP4_MOE": "mxfp4", "IQ2_XXS": "iq2_xxs+q2_k", "Q4_K_M": "q4_k+q6_k"}
DENSE = {"MXFP4_MOE": "int8-g32", "IQ2_XXS": "int8-g32", "Q4_K_M": "q4_k"}  # 16 bits are rounded
_SMALL = ("hc_", "_ape", "norm", "ffn_gate_inp.", "tid2eid")  # F32 and I32 in all of them
WIDE = {"hidden_size": 256, "moe_intermediate_size": 256, "q_lora_rank": 256, "o_lora_rank": 64}


def write(file: Path, like: Path, model: Any, kinds: Mapping[str, str], **changes: Any) -> Path:
    """Write a model with a file's metadata, and set the model's weights to the blocks' values."""
    config, writer = model.config, GGUFWriter(file, "deepseek4")
    sizes = {
        "embedding_length": config.hidden_size,
        "expert_feed_forward_length": config.moe_intermediate_size,
        "attention.q_lora_rank": config.q_lora_rank,
        "attention.output_lora_rank": config.o_lora_rank,
    }
    fields = {
        key.removeprefix("deepseek4."): value
        for key, value in read_header(like).fields.items()
        if key.startswith("deepseek4.")
    }
    for key, value in (fields | sizes | changes).items():
        kind = "array" if isinstance(value, list) else _TYPES[type(value)]
        getattr(writer, f"add_{kind}")(f"deepseek4.{key}", value)
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            for part, values in _parts(name, tensor):
                _add(writer, part, values, kinds)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


_TYPES = {bool: "bool", int: "uint32", float: "float32", str: "string"}


def _parts(name: str, tensor: Tensor) -> list[tuple[str, Tensor]]:
    """Return the file tensors of a parameter, as views, so that they can be set."""
    found = re.fullmatch(r"model\.layers\.(\d+)\.(.+)", name)
    before, own = (f"blk.{found[1]}.", found[2]) if found else ("", name)
    recipe = ARCHITECTURES["deepseek4"].recipe(own, lambda _: True)
    assert recipe is not None, name
    parts = tensor.chunk(len(recipe.tensors), dim=1) if len(recipe.tensors) > 1 else [tensor]
    return [(before + part, values) for part, values in zip(recipe.tensors, parts, strict=True)]


def _add(writer: GGUFWriter, name: str, tensor: Tensor, kinds: Mapping[str, str]) -> None:
    if not tensor.is_floating_point():
        writer.add_tensor(name, tensor.numpy().astype(np.int32))
        return
    values = np.ascontiguousarray(tensor.numpy(), dtype=np.float32)
    if values.ndim < 2 or any(part in name for part in _SMALL):
        writer.add_tensor(name, values)
        return
    block = GGMLQuantizationType[next(kind for part, kind in kinds.items() if part in name)]
    if values.shape[-1] % GGML_QUANT_SIZES[block][0]:
        block = GGMLQuantizationType.Q8_0  # as llama-quantize takes another type then
    data = quantised_blocks(values, block)
    writer.add_tensor(name, data, raw_dtype=block)
    tensor.copy_(torch.from_numpy(dequantize(data, block)).view(values.shape))


@pytest.fixture
def wide() -> Any:
    """Return a model with rows of 256 numbers, the size of low-bit blocks."""
    architecture, values = MODELS["deepseek4"]
    return build_tiny_model(architecture, values=values | WIDE)


@pytest.mark.parametrize("name", KINDS)
def test_answers_are_those_of_the_decoded_blocks(name: str, wide: Any, tmp_path: Path) -> None:
    like = unpacked("deepseek4", tmp_path)
    file = write(tmp_path / "model.gguf", like, wide, KINDS[name])
    expected = answers(wide)
    exact = tandem.load(file, dtype="fp32", expert_dtype="fp32")
    assert (answers(exact) - expected).norm() < 1e-4 * expected.norm()
    model = tandem.load(file, dtype="fp32", dense_dtype="auto")
    assert {layer.layout.format_name for layer in runtime_in(model).store} == {EXPERTS[name]}
    formats = {path: layer.packed.matrix.format.name for path, layer in packed_layers(model)}
    assert formats["model.layers.1.self_attn.q_b_proj"] == DENSE[name]
    assert (answers(model) - expected).norm() < 0.3 * expected.norm()  # near ties; errors give 1


@pytest.mark.parametrize(
    ("changes", "error", "sentence"),
    [
        ({"swiglu_clamp_exp": [0.5, 0.5, 0.5, 0.75]}, UnsupportedModelError, "one limit for all"),
        ({"swiglu_clamp_exp": [0.5, float("nan"), 1.0, 1.0]}, ModelError, "finite number"),
        ({"attention.compress_ratios": [0, 4, 8, 2]}, UnsupportedModelError, "4 tokens into a key"),
        ({"attention.compress_ratios": [0, 4]}, ModelError, "for 2 layers, expected 4"),
    ],
)
def test_metadata_that_make_no_model(
    changes: dict[str, Any], error: type[Exception], sentence: str, wide: Any, tmp_path: Path
) -> None:
    like = unpacked("deepseek4", tmp_path)
    file = write(tmp_path / "model.gguf", like, wide, KINDS["MXFP4_MOE"], **changes)
    with pytest.raises(error, match=sentence):
        tandem.load(file)


def with_mtp(directory: Path) -> Path:
    """Put the converter's MTP file beside the model's file; return the model's path."""
    unpacked(MTP, directory).rename(directory / "mtp-model.gguf")
    return unpacked("deepseek4", directory)


def test_its_mtp_layer_beside_the_model_gives_what_torch_gave(tmp_path: Path) -> None:
    model = tandem.load(with_mtp(tmp_path), dtype="fp32", expert_dtype="fp32", threads=1)
    ((head, embedding),) = load_mtp(model)
    pool = CpuSlotPool(head, two_threads(), 1, notes_hidden=True, inputs=embedding.fixed)
    embedding.give(mtp_streams(model.config).flatten(1))
    found = pool.prefill_with_logits(0, TOKENS[0])
    assert relative_error(found, load_file(EXPECTED)[MTP]) < 1e-5


def test_answers_with_drafts_are_those_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tandem.policy.speculation.paid_drafts._TRIALS", 10**6)  # each step drafts
    model = tandem.load(with_mtp(tmp_path), dense_dtype="auto", threads=1)
    model.generation_config.eos_token_id = None
    options: dict[str, Any] = {"max_new_tokens": 12, "temperature": 0}
    expected = Generator(model, speculate="none").generate([TOKENS[0]], **options)
    answers = Generator(model, speculate="mtp").generate([TOKENS[0]], **options)
    assert [a.token_ids for a in answers] == [e.token_ids for e in expected]
    assert answers[0].drafted_tokens > 0
    ((head, _),) = load_mtp(model)
    assert {layer.layout.format_name for layer in runtime_in(head).store} == {"mxfp4"}


def test_what_has_no_mtp_layer_says_so(tmp_path: Path) -> None:
    file = with_mtp(tmp_path)
    model = tandem.load(file, threads=1)
    mtp_file = tmp_path / "mtp-model.gguf"
    with pytest.raises(UnsupportedModelError, match=r"drafts for one .* give the .gguf file"):
        tandem.load(mtp_file)
    assert len(load_mtp(model, mtp_file)) == 1  # named itself
    with pytest.raises(UnsupportedModelError, match="converter leaves it out; put the file"):
        find_mtp(file, 128)  # of a wider model
    other = unpacked("deepseek32", tmp_path)
    with pytest.raises(UnsupportedModelError, match=r"'deepseek32'; of GGUF files .* safetensors"):
        load_mtp(model, other)
    mtp_file.unlink()
    with pytest.warns(TandemWarning, match="nothing is drafted by mtp: .* converter leaves it out"):
        Generator(model, speculate="mtp")


@pytest.mark.parametrize("shape", [None, (63,)])
def test_a_damaged_mtp_layer_is_one_sentence(shape: Any, tmp_path: Path) -> None:
    file = with_mtp(tmp_path)
    (layer,) = find_mtp(file, 64)
    name = "blk.0.nextn.hnorm.weight"
    tensors = {key: tensor for key, tensor in layer.tensors.items() if key != name}
    if shape is not None:
        tensors[name] = dataclasses.replace(layer.tensors[name], shape=shape)
    config = config_of(read_header(file))
    with pytest.raises(ModelError, match=r"nextn.hnorm.weight of its MTP layer, expected \(64,\)"):
        mtp_source(dataclasses.replace(layer, tensors=tensors), {}, config)
