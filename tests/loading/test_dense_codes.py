"""Tests that linear layers of quantised checkpoints keep their codes, or the plan reports it."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import tandem
from tandem.cli.main import main
from tandem.devices.cuda.linear import DeviceLinear
from tandem.forecast.sizes import model_sizes
from tandem.hf.checkpoint import open_model
from tandem.hf.config import OffloadConfig
from tandem.hf.dense import on_device, packed_layers
from tests.forecast.test_plan import loaded_bytes
from tests.hf.tiny import save_tiny_checkpoint
from tests.inside import logits_of, relative_error
from tests.kernels.interpreter import interpreted
from tests.loading.checkpoints import FORMATS, write_decoded
from tests.loading.gguf_files import tiny_model, write_gguf

KEPT = {
    "gptq": "int4-g32", "gptq-zeros": "int4z-g32", "awq": "int4z-g32", "packed-int4": "int4-g32",
    "packed-int8": "int8-g32", "fp8": "fp8",
    "nvfp4": "nvfp4", "modelopt-nvfp4": "nvfp4",
}  # fmt: skip


def formats_of(model: Any) -> dict[str, str]:
    return {path: layer.packed.matrix.format.name for path, layer in packed_layers(model)}


@pytest.mark.parametrize("name", KEPT)
def test_layers_are_the_checkpoints_codes(
    name: str, quantised: dict[str, Path], tmp_path: Path
) -> None:
    values = load_file(write_decoded(tmp_path / "decoded", quantised[name]) / "model.safetensors")
    model = tandem.load(quantised[name], dtype="fp32", dense_dtype="auto")
    kept = {p: layer for p, layer in packed_layers(model) if f"{p}.weight" in values}
    attention = [path for path in kept if "o_proj" in path]
    assert attention
    assert {formats_of(model)[path] for path in attention} == {KEPT[name]}
    for path in attention:
        found, expected = kept[path].packed.values(), values[f"{path}.weight"]
        # Zero points times scales are rounded to fp16: under a hundredth of a step.
        tolerance = 1e-3 if "z" in KEPT[name] else 0.0
        torch.testing.assert_close(found, expected, rtol=0, atol=tolerance)


@pytest.mark.parametrize("name", ["gptq", "awq", "fp8"])
def test_answers_are_those_of_the_values(
    name: str, quantised: dict[str, Path], tmp_path: Path
) -> None:
    decoded = write_decoded(tmp_path / "decoded", quantised[name])
    expected = logits_of(AutoModelForCausalLM.from_pretrained(decoded, dtype=torch.float32))
    found = logits_of(tandem.load(quantised[name], dtype="fp32", dense_dtype="auto"))
    assert relative_error(found, expected) < 0.05  # rounded activations


@pytest.mark.parametrize("name", FORMATS)
def test_the_plan_knows_the_bytes(name: str, quantised: dict[str, Path]) -> None:
    sizes = model_sizes(open_model(quantised[name]), OffloadConfig(dense_dtype="auto"))
    found = loaded_bytes(tandem.load(quantised[name], dense_dtype="auto"))
    assert (sizes.experts_bytes, sizes.total_dense_bytes) == found


def test_inputs_in_an_order_of_their_own(quantised: dict[str, Path], tmp_path: Path) -> None:
    values = load_file(
        write_decoded(tmp_path / "decoded", quantised["gptq-order"]) / "model.safetensors"
    )
    model = tandem.load(quantised["gptq-order"], dtype="fp32", dense_dtype="auto")
    ordered = {p: layer for p, layer in packed_layers(model) if layer.input_order is not None}
    assert {formats_of(model)[path] for path in ordered} == {"int4-g32"}
    for path, layer in ordered.items():
        assert torch.equal(layer.weight + 0, values[f"{path}.weight"])
        x = torch.randn(3, layer.in_features)
        error = layer(x) - x @ layer.values().T
        assert error.norm() < 0.01 * layer(x).norm()
    saved = tandem.load(tandem.save(model, tmp_path / "saved"))  # packed again, in order
    assert relative_error(logits_of(saved), logits_of(model)) < 0.05


def test_a_named_dtype_dequantises_and_the_plan_says_so(
    quantised: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    model = tandem.load(quantised["gptq"], dense_dtype="int8-g64")
    assert set(formats_of(model).values()) == {"int8-g64"}
    words = [str(quantised["gptq"]), "--no-measure", "--dense-dtype", "int8-g64"]
    assert main(["plan", *words]) == 0
    assert "with --dense-dtype auto" in capsys.readouterr().out


@pytest.fixture
def gpu_loads(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Place linear layers as on a GPU, with interpreted kernels."""
    pytest.importorskip("triton")
    cpu, gpu = torch.device("cpu"), torch.device("cuda", 0)
    monkeypatch.setattr("tandem.hf.load.dense_device", lambda offload, device_map: gpu)
    for name in ("keep_embeddings_on_host", "move_dense_parts"):
        monkeypatch.setattr(f"tandem.hf.assembly.{name}", lambda *_: None)
    for module in ("quantizer", "assembly"):
        monkeypatch.setattr(f"tandem.hf.{module}.place_on", lambda *_: on_device(cpu))
    with interpreted():
        yield


def on_gpu(model: Any) -> dict[str, DeviceLinear]:
    return {path: m for path, m in model.named_modules() if isinstance(m, DeviceLinear)}


@pytest.mark.parametrize("name", ["gptq-order", "nvfp4"])
def test_they_are_kept_on_a_gpu_and_saved_from_there(
    name: str, quantised: dict[str, Path], tmp_path: Path, gpu_loads: None
) -> None:
    decoded = write_decoded(tmp_path / "decoded", quantised[name])
    values = load_file(decoded / "model.safetensors")
    model = tandem.load(quantised[name], dtype="fp32", dense_dtype="auto")
    again = tandem.load(tandem.save(model, tmp_path / "saved"))
    layers, kept = on_gpu(model), on_gpu(again)
    assert set(layers) == set(kept)
    assert {f"{path}.weight" for path in layers} < set(values)
    # The head is not quantised in the checkpoint: int8, as on the CPU.
    assert [p for p, layer in layers.items() if layer.packed.format == "int8-g32"] == ["lm_head"]
    for path, layer in layers.items():
        x, is_rounded = torch.randn(1, layer.in_features), path == "lm_head"
        expected = x @ values[f"{path}.weight"].T
        assert (layer(x) - expected).norm() < (1e-2 if is_rounded else 1e-4) * expected.norm()
        error = kept[path].on_host().values() - values[f"{path}.weight"]
        is_rounded |= layer.input_order is not None  # in order again, as int8
        assert error.norm() <= (0.01 * values[f"{path}.weight"].norm() if is_rounded else 0)


@pytest.mark.parametrize(
    ("expert_dtype", "dense_dtype", "kinds"),
    [("int4", "auto", {"int8-g32"}), ("int4", "none", set()), ("bf16", "auto", set())],
)
def test_layers_of_16_bits_are_packed_on_a_gpu_as_on_the_cpu(
    expert_dtype: str, dense_dtype: str, kinds: set[str], tmp_path: Path, gpu_loads: None
) -> None:
    directory = save_tiny_checkpoint(tmp_path / "tiny", "deepseek_v3", kv_lora_rank=128)
    options = {"expert_dtype": expert_dtype, "dense_dtype": dense_dtype}
    layers = on_gpu(tandem.load(directory, dtype="bf16", **options))  # type: ignore[arg-type]
    assert {layer.packed.format for layer in layers.values()} == kinds
    # What is read by head would be there twice.
    assert not any("kv_b_proj" in path for path in layers)
    sizes = model_sizes(
        open_model(directory),
        OffloadConfig(device="cuda", **options),  # type: ignore[arg-type]
    )
    plain = model_sizes(open_model(directory), OffloadConfig(device="cuda", dense_dtype="none"))
    assert sizes.plain_dense_bytes == plain.dense_bytes
    assert (sizes.device_bytes < plain.device_bytes) == bool(kinds)


@pytest.mark.parametrize("name", ["gptq", "fp8"])
def test_saved_and_packed_they_are_the_same(
    name: str, quantised: dict[str, Path], tmp_path: Path
) -> None:
    model = tandem.load(quantised[name], dense_dtype="auto")
    assert len(set(formats_of(model).values())) > 1  # the head is not quantised in the checkpoint
    saved = tandem.save(model, tmp_path / "saved")
    tandem.pack(quantised[name], tmp_path / "packed", dense_dtype="auto")
    for directory in (saved, tmp_path / "packed"):
        again = tandem.load(directory)
        assert formats_of(again) == formats_of(model)
        assert torch.equal(logits_of(again), logits_of(model))
        sizes = model_sizes(open_model(directory), OffloadConfig())
        assert (sizes.experts_bytes, sizes.total_dense_bytes) == loaded_bytes(again)


@pytest.mark.parametrize("kind", ["Q4_0", "MXFP4"])
def test_blocks_of_a_gguf_file(kind: str, tmp_path: Path) -> None:
    expected = tiny_model("llama")  # whose queries and keys come in another order of rows
    write_gguf(tmp_path / "model.gguf", expected, kind, "llama")
    model = tandem.load(tmp_path / "model.gguf", dtype="fp32", dense_dtype="auto")
    dense = expected.state_dict()
    for path, layer in packed_layers(model):
        assert torch.equal(layer.packed.values(), dense[f"{path}.weight"]), path
    assert len(formats_of(model)) == 9  # attention of two layers, and the head


def test_a_tied_head_has_the_codes_of_the_embeddings(tmp_path: Path) -> None:
    expected = tiny_model("llama", {"tie_word_embeddings": True})
    write_gguf(tmp_path / "model.gguf", expected, "IQ4_NL", "llama")
    model = tandem.load(tmp_path / "model.gguf", dtype="fp32", dense_dtype="auto")
    head = dict(packed_layers(model))["lm_head"]
    assert formats_of(model)["lm_head"] == "iq4_nl"
    embeddings = expected.get_input_embeddings().weight
    assert torch.equal(head.packed.values(), embeddings)
    assert torch.equal(model.get_input_embeddings().weight, embeddings)
    assert model.get_input_embeddings().packed.matrix is head.packed.matrix  # in memory once
    ids = torch.tensor([[5, 127, 0]])
    assert torch.equal(model.get_input_embeddings()(ids), embeddings[ids])
    again = tandem.load(tmp_path / "model.gguf", dense_dtype="auto")
    sizes = model_sizes(open_model(tmp_path / "model.gguf"), OffloadConfig(dense_dtype="auto"))
    assert (sizes.experts_bytes, sizes.total_dense_bytes) == loaded_bytes(again)
    tandem.pack(tmp_path / "model.gguf", tmp_path / "packed", dense_dtype="auto")
    packed = tandem.load(tmp_path / "packed")
    assert formats_of(packed) == formats_of(again)
    again = tandem.load(tmp_path / "model.gguf", dtype="bf16", dense_dtype="auto")
    assert torch.equal(logits_of(packed), logits_of(again))
