"""Tests of GGUF files written with the gguf package, against Transformers' own reading."""

from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

import tandem
from tandem.checkpoint.sources.gguf_blocks import FORMATS
from tandem.checkpoint.sources.gguf_header import read_header
from tandem.checkpoint.sources.gguf_weight import GgufWeight
from tandem.core.errors import ModelError, TandemWarning, UnsupportedModelError
from tandem.forecast.sizes import model_sizes
from tandem.generate.generator import Generator
from tandem.hf.checkpoint import open_model
from tandem.hf.config import OffloadConfig
from tandem.kernels.memory import allocate
from tests.inside import logits_of, relative_error, runtime_in
from tests.loading.gguf_files import MIXTURES, TINY, WIDE, tiny_model, write_gguf

CASES = [("qwen3moe", kind) for kind in (*FORMATS, *MIXTURES) if kind != "apart"]
MIXED = {
    "a layer in BF16": ["bf16", "int8-g32"],
    "a projection in 16 bits": ["int8-g32+bf16", "fp16+int8-g32"],
    "Q4_K_M": ["q4_k+q6_k", "q4_k"], "UD-Q4_K_XL": ["q4_k+q5_k", "iq4_xs+q4_k"],
    "unlike Q4_K": ["q5_k+q4_k", "q6_k+q4_k"],
    "unlike IQ4_NL": ["int8-g32+iq4_nl", "int5-g32+int5z-g32"],
}  # fmt: skip
CASES += [(name, "MXFP4" if name == "gpt-oss" else "Q8_0") for name in TINY if name != "qwen3moe"]


def difference(found: Any, expected: Any) -> float:
    """Return the relative difference of two models' logits."""
    return relative_error(logits_of(found), logits_of(expected))


@pytest.mark.parametrize(("architecture", "kind"), CASES)
def test_answers_are_those_of_the_decoded_blocks(
    architecture: str, kind: str, tmp_path: Path
) -> None:
    is_wide = kind in MIXTURES or GGML_QUANT_SIZES[GGMLQuantizationType[kind]][0] > 32
    expected = tiny_model(architecture, WIDE if is_wide else None)
    file = write_gguf(tmp_path / "model.gguf", expected, kind, architecture)
    model = tandem.load(file, dtype="fp32")
    names = [x.layout.format_name for x in runtime_in(model).store]
    assert names == (MIXED[kind] if kind in MIXED else [FORMATS[kind]] * len(names))
    # Activations are rounded to int8, which may flip a router's near tie; wrong weights give 1.
    assert difference(model, expected) < 0.1
    dense = expected.state_dict()
    for name, value in model.state_dict().items():
        if "experts." not in name or "shared_expert" in name:  # all but routed experts
            assert torch.equal(value, dense[name]), name
    for layer in runtime_in(model).store:
        up, down = (dense[f"{layer.arrivals.name}.{n}_proj"][3] for n in ("gate_up", "down"))
        if layer.is_transposed:  # gpt-oss: inputs first, gate and up take turns
            up, down = torch.cat((up.T[0::2], up.T[1::2])), down.T
        assert torch.equal(layer.weights(3).up, up)
        assert torch.equal(layer.weights(3).down, down)


def test_types_that_no_format_holds_together_are_rounded_and_named(tmp_path: Path) -> None:
    expected = tiny_model(sizes=WIDE)
    file = write_gguf(tmp_path / "model.gguf", expected, "apart")
    message = (
        r"layers.0.*\(GGUF blocks IQ4_XS and Q5_K\) to int8-g32 and 1 more like it are rounded"
    )
    with pytest.warns(TandemWarning, match=message):
        model = tandem.load(file, dtype="fp32")
    layers = list(runtime_in(model).store)
    assert [x.layout.format_name for x in layers] == ["int8-g32+q4_k"] * 2
    dense = expected.state_dict()
    for layer in layers:
        up, down = (dense[f"{layer.arrivals.name}.{n}_proj"][3] for n in ("gate_up", "down"))
        assert (layer.weights(3).up - up).norm() < 0.006 * up.norm()
        assert torch.equal(layer.weights(3).down, down)
    assert difference(model, expected) < 0.1


@pytest.mark.parametrize("architecture", ["qwen3moe", "gpt-oss"])
def test_a_file_of_plain_numbers(architecture: str, tmp_path: Path) -> None:
    expected = tiny_model(architecture)
    file = write_gguf(tmp_path / "model.gguf", expected, "F16", architecture)
    model = tandem.load(file)
    assert model.dtype == torch.float16
    assert {x.layout.format.name for x in runtime_in(model).store} == {"fp16"}
    assert difference(model, expected) < 0.02


def test_values_are_fp32_where_linear_layers_keep_their_blocks(tmp_path: Path) -> None:
    expected = tiny_model(sizes=WIDE)
    file = write_gguf(tmp_path / "model.gguf", expected, "Q4_K")
    model = tandem.load(file, dense_dtype="auto")
    assert (model.dtype, runtime_in(model).kv_dtype) == (torch.float32, "bf16")
    generator = Generator(model)
    generator.generate([1, 2, 3], max_new_tokens=5)
    assert generator.why_slower is None
    others: list[dict[str, Any]] = [
        {},
        {"dense_dtype": "auto", "device": "emulated", "gpu_memory": "1MiB"},
    ]
    for options in others:
        plain = tandem.load(file, **options)
        assert (plain.dtype, runtime_in(plain).kv_dtype) == (torch.bfloat16, "auto")
        runtime_in(plain).close()
    assert tandem.load(file, dtype="bf16", dense_dtype="auto").dtype == torch.bfloat16


PLAIN = {"dense_dtype": "auto", "expert_dtype": "bf16"}


@pytest.mark.parametrize(
    ("kind", "options", "dtype", "formats"),
    [
        ("BF16", {"dense_dtype": "auto"}, torch.bfloat16, ["bf16", "bf16"]),
        ("F16", {"dense_dtype": "auto"}, torch.float16, ["fp16", "fp16"]),
        ("a layer in BF16", {"dense_dtype": "auto"}, torch.bfloat16, ["bf16", "int8-g32"]),
        ("Q8_0", PLAIN, torch.bfloat16, ["bf16", "bf16"]),
        ("BF16", {"dense_dtype": "auto", "expert_dtype": "int4"}, torch.float32, ["int4-g32"] * 2),
    ],
)
def test_experts_of_16_bits_are_not_widened(
    kind: str, options: dict[str, Any], dtype: torch.dtype, formats: list[str], tmp_path: Path
) -> None:
    file = write_gguf(tmp_path / "model.gguf", tiny_model(), kind)
    model = tandem.load(file, **options)
    assert model.dtype == dtype
    assert [layer.layout.format_name for layer in runtime_in(model).store] == formats
    sizes = model_sizes(open_model(file), OffloadConfig(**options))
    assert sizes.experts_bytes == sum(layer.num_bytes for layer in runtime_in(model).store)


def test_what_is_rounded_again_shares_no_memory_with_what_is_kept(tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "model.gguf", tiny_model(), "Q4_0")
    weight = read_header(file).tensors["blk.0.ffn_up_exps.weight"]
    before = allocate(64)
    GgufWeight(name=weight.name, tensors=(weight,)).read(0)
    assert allocate(64).data_ptr() - before.data_ptr() == before.nbytes


def test_blocks_without_a_format_name_an_expert_dtype(tmp_path: Path) -> None:
    model, file = tiny_model(sizes=WIDE), tmp_path / "model.gguf"
    write_gguf(file, model, "TQ2_0")
    with pytest.raises(UnsupportedModelError, match=r"GGUF blocks TQ2_0.*give an expert_dtype"):
        tandem.load(file)
    loaded = tandem.load(file, expert_dtype="int8-g32", dtype="fp32")
    assert difference(loaded, model) < 0.03


def test_other_architectures_are_refused(tmp_path: Path) -> None:
    write_gguf(tmp_path / "model.gguf", tiny_model(), "Q8_0", architecture="gemma2")
    with pytest.raises(UnsupportedModelError, match=r"architecture 'gemma2'; of GGUF Tandem reads"):
        tandem.load(tmp_path / "model.gguf")


@pytest.mark.parametrize("length", [10, 4000, -100])
def test_a_damaged_file(tmp_path: Path, length: int) -> None:
    file = write_gguf(tmp_path / "model.gguf", tiny_model(), "Q8_0")
    file.write_bytes(file.read_bytes()[:length])
    with pytest.raises(ModelError, match=r"model\.gguf .*download it again"):
        tandem.load(file)
