"""Tests of DeepSeek-V4 as released: exact values, lossless packing, errors in one sentence."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

import tandem
from tandem.core.errors import ModelError
from tandem.forecast.sizes import model_sizes
from tandem.hf.checkpoint import open_model
from tandem.hf.config import OffloadConfig
from tandem.hf.dense import packed_layers
from tests.inside import logits_of, relative_error, runtime_in
from tests.loading.deepseek_v4 import (
    decoded_weight,
    released_tensors,
    tiny_model,
    write_decoded,
    write_released,
)

Tensors = dict[str, Tensor]


@pytest.fixture(scope="module")
def tensors(tmp_path_factory: pytest.TempPathFactory) -> Tensors:
    """Return a tiny model's tensors by the release's names."""
    return released_tensors(tmp_path_factory.mktemp("model"), tiny_model())


@pytest.fixture(scope="module", params=["e2m1", "e4m3"])
def checkpoints(
    request: pytest.FixtureRequest, tensors: Tensors, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Path, str]:
    """A released checkpoint, its decoded values, and its experts' format."""
    directory = tmp_path_factory.mktemp("released")
    released = write_released(directory / "released", tensors, experts=request.param)
    formats = {"e2m1": "mxfp4", "e4m3": "fp8"}
    return released, write_decoded(directory / "decoded", released), formats[request.param]


def test_names_and_types_are_those_of_the_release(checkpoints: tuple[Path, Path, str]) -> None:
    stored = load_file(checkpoints[0] / "model.safetensors")
    assert {"embed.weight", "norm.weight", "head.weight", "hc_head_fn"} <= set(stored)
    assert not any(name.startswith("model.") for name in stored)
    types = {
        "layers.0.attn.wq_a.weight": torch.float8_e4m3fn,
        "layers.1.attn.indexer.wq_b.scale": torch.float8_e8m0fnu,
        "layers.1.attn.indexer.compressor.ape": torch.float32,
        "layers.2.attn.compressor.wkv.weight": torch.bfloat16,
        "layers.0.ffn.gate.tid2eid": torch.int64,
        "layers.2.ffn.gate.bias": torch.float32,
        "layers.0.ffn.experts.7.w2.scale": torch.float8_e8m0fnu,
        "mtp.0.e_proj.weight": torch.float8_e4m3fn,
        "mtp.0.hc_head_scale": torch.float32,
    }
    assert {name: stored[name].dtype for name in types} == types
    kinds = {stored[f"layers.0.ffn.experts.0.w{n}.weight"].dtype for n in (1, 2, 3)}
    assert kinds == {torch.int8 if checkpoints[2] == "mxfp4" else torch.float8_e4m3fn}


def test_values_are_exact(checkpoints: tuple[Path, Path, str]) -> None:
    released, decoded, fmt = checkpoints
    model = tandem.load(released, dtype="fp32")
    plain = AutoModelForCausalLM.from_pretrained(decoded, dtype=torch.float32)
    dense = plain.state_dict()
    for parameter, value in model.state_dict().items():
        if ".experts." not in parameter:
            assert torch.equal(value, dense[parameter]), parameter
    values = load_file(decoded / "model.safetensors")
    for layer in runtime_in(model).store:
        assert layer.layout.format_name == fmt
        for expert in range(layer.arrivals.num_experts):
            at = f"layers.{layer.layer}.ffn.experts.{expert}"
            found = layer.weights(expert)
            gate, down, up = (values[f"{at}.w{n}.weight"] for n in (1, 2, 3))
            assert torch.equal(found.up, torch.cat([gate, up]))
            assert torch.equal(found.down, down)
    assert relative_error(logits_of(model), logits_of(plain)) < 0.03
    of_values = tandem.load(released, dtype="fp32", expert_dtype="fp32")
    assert relative_error(logits_of(of_values), logits_of(plain)) < 1e-5


def test_linear_layers_keep_their_codes(checkpoints: tuple[Path, Path, str]) -> None:
    released, decoded, _ = checkpoints
    model = tandem.load(released, dtype="fp32", dense_dtype="auto")
    sizes = model_sizes(open_model(released), OffloadConfig(dense_dtype="auto"))
    assert sizes.experts_bytes == sum(layer.num_bytes for layer in runtime_in(model).store)
    formats = {path: layer.packed.matrix.format.name for path, layer in packed_layers(model)}
    of_attention = {
        path.rpartition("self_attn.")[2]: name
        for path, name in formats.items()
        if "layers.1.self_attn" in path
    }
    coded = ("q_a_proj", "q_b_proj", "kv_proj", "o_a_proj", "o_b_proj")
    assert {name for name, fmt in of_attention.items() if fmt == "fp8"} == {
        *coded,
        "compressor.indexer.q_b_proj",
    }
    plain = AutoModelForCausalLM.from_pretrained(decoded, dtype=torch.float32)
    assert relative_error(logits_of(model), logits_of(plain)) < 0.05


def test_saved_and_packed_it_is_the_same(
    checkpoints: tuple[Path, Path, str], tmp_path: Path
) -> None:
    released, _, fmt = checkpoints
    model = tandem.load(released)
    expected = logits_of(model)
    tandem.save(model, tmp_path / "saved")
    tandem.pack(released, tmp_path / "packed")
    for copy in (tmp_path / "saved", tmp_path / "packed"):
        again = tandem.load(copy)
        assert {layer.layout.format_name for layer in runtime_in(again).store} == {fmt}
        assert torch.equal(logits_of(again), expected)


def _cut(tensors: Tensors, name: str) -> None:
    tensors[name] = tensors[name][:, :-1].contiguous()


def _as_fp32(tensors: Tensors, name: str) -> None:
    tensors[name] = tensors[name].float()


def _as_bytes(tensors: Tensors, name: str) -> None:
    tensors[name] = tensors[name].view(torch.uint8)


def _not_a_number(tensors: Tensors, name: str) -> None:
    tensors[name].view(torch.uint8)[0, 0] = 255


EXPERT, DENSE = "layers.1.ffn.experts.3.w2", "layers.1.attn.wq_b"


@pytest.mark.parametrize(
    ("damage", "name", "sentence"),
    [
        (
            _cut,
            f"{EXPERT}.scale",
            r"w2\.scale is F8_E8M0 of shape \(192, 4\), expected.*\(192, 5\)",
        ),
        (_cut, f"{EXPERT}.weight", r"w2\.scale is .* of 158 inputs of .*; download"),
        (_as_fp32, f"{EXPERT}.scale", r"w2\.scale is F32 of shape .*, expected F8_E8M0"),
        (_not_a_number, f"{EXPERT}.scale", r"w2\.weight has .*255.*NaN"),
        (Tensors.pop, f"{EXPERT}.scale", r"w2\.scale is missing, expected F8_E8M0"),
        (_cut, f"{DENSE}.weight", r"q_b_proj\.weight of shape \(256, 95\), but config\.json asks"),
        (_as_bytes, f"{DENSE}.scale", r"wq_b\.scale is U8, expected one of F32"),
        (_not_a_number, f"{DENSE}.scale", r"wq_b\.weight's scales hold NaN"),
        (Tensors.pop, f"{DENSE}.scale", r"wq_b\.weight has no layers\.1\.attn\.wq_b\."),
    ],
)
def test_damage_is_one_sentence(
    damage: Callable[[Tensors, str], object],
    name: str,
    sentence: str,
    tensors: Tensors,
    tmp_path: Path,
) -> None:
    released = write_released(tmp_path, tensors)
    stored = load_file(released / "model.safetensors")
    damage(stored, name)
    save_file(stored, released / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError, match=sentence):
        tandem.load(released, dtype="fp32")


@pytest.mark.parametrize("count", [1 << 30, 0, "many"])
def test_iterations_that_would_never_end(count: object, tensors: Tensors, tmp_path: Path) -> None:
    released = write_released(tmp_path, tensors, hc_sinkhorn_iters=count)
    with pytest.raises(ModelError, match=r"hc_sinkhorn_iters is .*, expected a whole number up to"):
        tandem.load(released)


def test_the_plain_decoder_knows_every_code() -> None:
    codes = torch.arange(256, dtype=torch.uint8).repeat(2, 1).view(torch.int8)[:, :16]
    scales = torch.tensor([[126], [130]], dtype=torch.uint8).view(torch.float8_e8m0fnu)
    found = decoded_weight(codes, scales)
    assert found[0, :4].tolist() == [0.0, 0.0, 0.25, 0.0]
    assert torch.equal(found[1], 16 * found[0])
