"""DeepSeek-V4 in GGUF in the types in which it is published: the converter's file in other types.

That names and metadata are llama.cpp's is what `test_gguf_models` shows of the converter's file.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFWriter
from gguf.quants import dequantize
from torch import Tensor

import tandem
from tandem.checkpoint.sources.gguf_header import read_header
from tandem.checkpoint.sources.gguf_models import ARCHITECTURES
from tandem.core.errors import ModelError, UnsupportedModelError
from tandem.hf.dense import packed_layers
from tests.architectures import build_tiny_model
from tests.inside import runtime_in
from tests.loading.gguf_files import quantised_blocks
from tests.loading.make_gguf_files import MODELS, answers
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
    """Write a model by a file's metadata, and give it the values that its blocks stand for."""
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
    """Return the tensors of a parameter in a file: views, so that they can be set."""
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
    """Return a model with rows of 256 numbers, which blocks of few bits have."""
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
    assert (answers(model) - expected).norm() < 0.3 * expected.norm()  # near ties; others give 1


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
