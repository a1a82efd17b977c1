"""Tests of Llama 4 beyond those of all architectures: the released models' class, and refusals."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import tandem
from tandem.bench.model_shapes import ModelShape
from tandem.bench.random_model import build_random_model
from tandem.core.errors import UnsupportedModelError
from tandem.decode.cpu_slots import CpuSlotPool
from tandem.decode.padded import PaddedBatch
from tandem.generate.generator import Generator
from tandem.hf.config import OffloadConfig
from tandem.hf.dense_place import keep_embeddings_on_host
from tests.architectures import build_tiny_model, tiny_inputs
from tests.conftest import two_threads
from tests.decode.twin_capture import TwinCapture
from tests.decode.whole_pool import cuda_pool, logits_of
from tests.inside import logits_of as logits_in
from tests.inside import relative_error, runtime_in
from tests.loading.checkpoints import FORMATS, write_decoded, write_plain, write_quantised

WHOLE = "Llama4ForConditionalGeneration"
TOKENS = [60, 71, 82, 93, 104]


def test_the_class_of_released_models_answers_as_its_text_part(tmp_path: Path) -> None:
    """The class's own forward fails on text in Transformers 5.24."""
    model: Any = build_tiny_model("llama4", class_name=WHOLE)
    model.save_pretrained(tmp_path)
    offloaded = tandem.load(tmp_path, dtype="float32")
    ids = tiny_inputs(model)["input_ids"]
    with torch.no_grad():
        found, expected = offloaded(ids).logits, model.language_model(ids).logits
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    generator = Generator(offloaded)
    answer = generator.generate([40, 41, 42, 43, 44, 45], max_new_tokens=8, temperature=0)[0]
    assert generator.why_padded is None
    assert generator.why_slower is None
    text = model.language_model.generate(
        torch.tensor([[40, 41, 42, 43, 44, 45]]), max_new_tokens=8, do_sample=False, pad_token_id=0
    )
    assert answer.token_ids == text[0, 6:].tolist()[: len(answer.token_ids)]


def test_captured_steps_of_slots_are_the_models(tmp_path: Path) -> None:
    """Each slot has its own chunk and temperature; embeddings come from the host."""
    build_tiny_model("llama4").save_pretrained(tmp_path)
    model, other = (tandem.load(tmp_path, dtype="float32") for _ in range(2))
    keep_embeddings_on_host(other, other.device)
    prompts = [[40, 41, 42, 43, 44, 45, 46], [50, 51]]
    pool = cuda_pool(other, prompts, 20, make_capture=TwinCapture)
    found = logits_of(pool, 2, TOKENS)
    assert pool.step.is_replaying, pool.step.why_not
    alone = [PaddedBatch(model, [prompt], 0) for prompt in prompts]  # padding would count
    expected = [torch.cat([one.prefill() for one in alone])]
    for token in TOKENS:
        expected.append(torch.cat([one.decode([token]) for one in alone]))
    torch.testing.assert_close(found, expected, rtol=2e-4, atol=2e-4)


def one_by_one(directory: Path) -> None:
    """Write a checkpoint's experts one by one, as quantised checkpoints store them."""
    file = directory / "model.safetensors"
    tensors = load_file(file)
    for name in [name for name in tensors if ".experts." in name]:
        fused, path = tensors.pop(name), name.rpartition(".")[0]
        for expert, matrix in enumerate(fused.transpose(1, 2)):
            parts = matrix.chunk(2) if "gate_up" in name else [matrix]
            words = ("gate", "up") if len(parts) > 1 else ("down",)
            for part, rows in zip(words, parts, strict=True):
                tensors[f"{path}.{expert}.{part}_proj.weight"] = rows.contiguous()
    save_file(tensors, file, {"format": "pt"})


@pytest.mark.parametrize("expert_dtype", ["auto", "int8"])
def test_experts_may_come_one_by_one(tmp_path: Path, expert_dtype: str) -> None:
    build_tiny_model("llama4").save_pretrained(tmp_path)
    options: Any = {"dtype": "float32", "expert_dtype": expert_dtype}
    expected = logits_in(tandem.load(tmp_path, **options))
    one_by_one(tmp_path)
    assert torch.equal(logits_in(tandem.load(tmp_path, **options)), expected)


@pytest.mark.parametrize("name", ["packed-int4", "fp8"])
def test_codes_of_quantised_experts_are_kept(tmp_path: Path, name: str) -> None:
    plain = write_plain(tmp_path / "plain", "llama4")
    one_by_one(plain)
    quantised = write_quantised(tmp_path / "quantised", plain, FORMATS[name])
    decoded = tandem.load(write_decoded(tmp_path / "decoded", quantised), dtype="float32")
    model = tandem.load(quantised, dtype="float32")
    formats = {layer.layout.format.name for layer in runtime_in(model).store}
    assert formats == {"fp8" if name == "fp8" else "int4-g32"}
    assert relative_error(logits_in(model), logits_in(decoded)) < 0.03


def test_random_weights_make_a_model_whose_head_reads_what_is_noted() -> None:
    config = build_tiny_model("llama4").config.to_dict()
    dropped = ("model_type", "architectures", "dtype", "transformers_version")
    values = {key: value for key, value in config.items() if key not in dropped}
    options = OffloadConfig(expert_dtype="int4", threads=1)
    model = build_random_model(ModelShape("llama4_text", values), options, dense_dtype="none")
    pool = CpuSlotPool(model, two_threads(), 1, notes_hidden=True)
    pool.prefill({0: [40, 41, 42]})
    logits = pool.decode({0: 43})
    assert pool.hidden is not None
    with torch.no_grad():
        torch.testing.assert_close(model.lm_head(pool.hidden), logits)


def test_more_experts_a_token_are_refused(tmp_path: Path) -> None:
    build_tiny_model("llama4", values={"num_experts_per_tok": 2}).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError, match="sends a token to 2 experts"):
        tandem.load(tmp_path)
