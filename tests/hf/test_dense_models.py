"""Tests of models without experts: the same code loads, steps and packs them."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import tandem
from tandem.bench.routing_recording import recording
from tandem.core.errors import CapacityError, ConfigError, UnsupportedModelError
from tandem.hf.assembly import profile_of
from tandem.hf.dense import packed_layers
from tandem.hf.packed_layers import PackedLinear
from tandem.hf.runtime import require_runtime
from tandem.recording.recorded_graph import RecordedGraph
from tests.architectures import build_tiny_dense_model
from tests.hf.tiny import save_tiny_dense
from tests.inside import logits_of, relative_error

PROMPT = [40, 41, 42, 43, 41, 42, 50]
CLASSES = {
    "qwen3": "Qwen3ForCausalLM",
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "gemma3": "Gemma3ForCausalLM",
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_dense(tmp_path_factory.mktemp("dense") / "qwen3")


def greedy(model: Any, **options: Any) -> tuple[list[int], tandem.Generator]:
    model.generation_config.eos_token_id = None
    generator = tandem.Generator(model, **options)
    (answer,) = generator.generate(PROMPT, max_new_tokens=12, temperature=0)
    return answer.token_ids, generator


@pytest.mark.parametrize("name", CLASSES)
def test_logits_and_recorded_steps_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    eager: Any = build_tiny_dense_model(name, class_name=CLASSES[name])
    eager.save_pretrained(tmp_path)
    model = tandem.load(tmp_path, dtype="float32", threads=1)
    assert type(model).__name__ == CLASSES[name]
    assert len(require_runtime(model).store) == 0
    assert relative_error(logits_of(model), logits_of(eager)) < 1e-5
    eager.generation_config.eos_token_id = None
    expected = eager.generate(torch.tensor([PROMPT]), max_new_tokens=12, do_sample=False)[0, 7:]
    written, generator = greedy(model)
    assert written == expected.tolist()
    assert generator.why_slower is None
    assert isinstance(generator.recorded_graph, RecordedGraph)


@pytest.mark.parametrize(
    ("dense_dtype", "most"), [("int8-g32", 0.02), ("int4", 0.2), ("fp16", 0.002)]
)
def test_dense_dtype_packs_the_linear_layers(
    checkpoint: Path, dense_dtype: str, most: float
) -> None:
    model = tandem.load(checkpoint, dtype="float32", dense_dtype=dense_dtype, threads=1)
    kinds = {path.rpartition(".")[2] for path, _ in packed_layers(model)}
    assert kinds == {
        "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "lm_head",
    }  # fmt: skip
    expected = logits_of(build_tiny_dense_model("qwen3", class_name=CLASSES["qwen3"]))
    assert 0 < relative_error(logits_of(model), expected) < most
    written, generator = greedy(model)
    assert len(written) == 12
    assert isinstance(generator.recorded_graph, RecordedGraph)


def test_auto_leaves_what_is_not_quantised_as_loaded(checkpoint: Path) -> None:
    model = tandem.load(checkpoint, dtype="float32", dense_dtype="auto", threads=1)
    assert not any(isinstance(module, PackedLinear) for module in model.modules())
    written, _ = greedy(model, dense_dtype="auto")
    assert written == greedy(tandem.load(checkpoint, dtype="float32", threads=1))[0]


def test_drafts_by_lookup_write_the_same(checkpoint: Path) -> None:
    model = tandem.load(checkpoint, dtype="bfloat16", dense_dtype="int8", threads=1)
    expected, _ = greedy(model, speculate="none")
    assert greedy(model, speculate="lookup")[0] == expected


def test_a_quantization_config_loads_one_too(checkpoint: Path) -> None:
    config = tandem.OffloadConfig(dense_dtype="int8", threads=1)
    model: Any = AutoModelForCausalLM.from_pretrained(checkpoint, quantization_config=config)
    assert any(packed_layers(model))
    with model:
        assert model.get_memory_footprint() < model.num_parameters() * 3  # fp32: 4


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"expert_dtype": "int4"}, r"^expert_dtype: only for experts, and qwen3 .* dense model"),
        ({"eviction": "lru", "gpu_memory": "1GiB"}, r"^gpu_memory, eviction: only for experts"),
        ({"expert_memory": "1GiB"}, r"expert_memory"),
        (
            {"device": "emulated"},
            r"qwen3 .* is a dense model: .* device 'emulated', .* 'cuda' where",
        ),
    ],
)
def test_what_is_of_experts_is_refused(
    checkpoint: Path, options: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(ConfigError, match=sentence):
        tandem.load(checkpoint, **options)


def test_what_measures_experts_is_refused(checkpoint: Path) -> None:
    model = tandem.load(checkpoint, threads=1)
    with pytest.raises(UnsupportedModelError, match="is a dense model: it has no experts"):
        profile_of(model)
    with pytest.raises(UnsupportedModelError, match="no experts"), recording(model):
        pass


def test_a_saved_model_answers_to_the_bit(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tandem.load(checkpoint, dtype="bfloat16", dense_dtype="int4", threads=1)
    directory = tandem.save(model, tmp_path / "packed")
    again = tandem.load(directory, threads=1)
    assert torch.equal(logits_of(again), logits_of(model))
    by_itself: Any = AutoModelForCausalLM.from_pretrained(directory)
    assert torch.equal(logits_of(by_itself), logits_of(model))
    with pytest.raises(ConfigError, match=r"packed with dense_dtype 'int4.*cannot be loaded as"):
        tandem.load(directory, dense_dtype="int8")
    monkeypatch.setattr("tandem.hf.packed_reading.available_bytes", lambda: 1000)
    with pytest.raises(CapacityError, match=r"the model's weights take .* of host memory"):
        tandem.load(directory)


def test_one_that_memory_does_not_hold_is_refused(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tandem.experts.store.host_memory.available_bytes", lambda: 1000)
    with pytest.raises(CapacityError, match=r"the model's weights take .* smaller model"):
        tandem.load(checkpoint)
