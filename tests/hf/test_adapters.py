"""Tests of PEFT adapters: those on modules that Tandem keeps run fast; others are refused."""

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch

import tandem
from tandem.core.errors import ConfigError, ModelError, UnsupportedModelError
from tests.hf.tiny import save_tiny_checkpoint

# PEFT's own use of Transformers, which cannot be changed here.
pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
needs_peft = pytest.mark.skipif(
    importlib.util.find_spec("peft") is None, reason="peft is not installed (dev extra)"
)
IDS = [20, 21, 22, 23]


@pytest.fixture
def model(checkpoint: Path) -> Any:
    return tandem.load(checkpoint, dtype="float32")


def lora(**options: Any) -> Any:
    """Return a LoRA config whose adapters change the output from the start."""
    from peft import LoraConfig

    return LoraConfig(init_lora_weights=False, **options)


def adapted(model: Any, **options: Any) -> Any:
    from peft import get_peft_model

    torch.manual_seed(0)
    return get_peft_model(model, lora(**options))


def with_transformers(model: Any) -> list[int]:
    ids = torch.tensor([IDS])
    found = model.generate(
        input_ids=ids, max_new_tokens=12, do_sample=False, pad_token_id=0, eos_token_id=-1
    )
    return found[0, len(IDS) :].tolist()


def with_tandem(generator: tandem.Generator) -> list[int]:
    generator.model.generation_config.eos_token_id = None
    return generator.generate(IDS, max_new_tokens=12, temperature=0)[0].token_ids


@needs_peft
def test_a_generator_follows_the_adapters_of_a_model(model: Any) -> None:
    plain = with_transformers(model)
    both = adapted(model, target_modules=["q_proj", "v_proj"])
    both.add_adapter("other", lora(target_modules=["k_proj", "v_proj"]))
    generator = tandem.Generator(both)
    answers = [with_tandem(generator)]
    assert answers[0] == with_transformers(both)
    assert generator.why_slower is None
    both.set_adapter("other")  # after a step has been recorded
    answers.append(with_tandem(generator))
    assert answers[1] == with_transformers(both)
    with both.disable_adapter():
        assert with_tandem(generator) == plain
    assert with_tandem(generator) == answers[1]
    assert len({tuple(plain), *map(tuple, answers)}) == 3


@needs_peft
def test_adapters_are_saved_and_loaded_by_transformers(
    model: Any, checkpoint: Path, tmp_path: Path
) -> None:
    first = adapted(model, target_modules=["q_proj"])
    answer = with_tandem(tandem.Generator(first))
    first.save_pretrained(tmp_path / "adapter")
    second = tandem.load(checkpoint, dtype="float32")
    second.load_adapter(str(tmp_path / "adapter"))
    assert with_tandem(tandem.Generator(second)) == answer


@needs_peft
@pytest.mark.parametrize(
    "options",
    [{"target_modules": "all-linear"}, {"target_parameters": ["mlp.experts.gate_up_proj"]}],
)
def test_adapters_on_experts_are_refused(model: Any, options: dict[str, Any]) -> None:
    with pytest.raises(
        ConfigError, match="adapter cannot change experts, because Tandem computes them"
    ):
        adapted(model, **options)


@needs_peft
def test_adapters_on_packed_layers_are_told_how_to_load(tmp_path: Path) -> None:
    directory = save_tiny_checkpoint(tmp_path / "tiny", hidden_size=256)
    packed = tandem.load(directory, dense_dtype="int8")
    with pytest.raises(ValueError, match=r"PackedLinear\(256.*needs tandem.load.*dtype=\"none\""):
        adapted(packed, target_modules=["q_proj"])
    adapted(tandem.load(directory, dense_dtype="none"), target_modules=["q_proj"])


@pytest.mark.parametrize("part", ["self_attn.q_proj", "mlp.experts", "model"])
def test_a_state_dict_is_not_loaded_over_packed_weights(part: str, tmp_path: Path) -> None:
    directory = save_tiny_checkpoint(tmp_path / "tiny", hidden_size=256)
    model = tandem.load(directory, expert_dtype="int8", dense_dtype="int8")
    module = next(m for name, m in model.named_modules() if name.endswith(part))
    before = with_transformers(model)
    with pytest.raises(ConfigError, match=r'load_state_dict .* dense_dtype="none"'):
        module.load_state_dict(module.state_dict())
    assert with_transformers(model) == before


@needs_peft
def test_what_cannot_be_done_with_adapters_is_a_sentence(model: Any, tmp_path: Path) -> None:
    from peft import PromptTuningConfig, TaskType, get_peft_model

    prompt = PromptTuningConfig(task_type=TaskType.CAUSAL_LM, num_virtual_tokens=2)
    with pytest.raises(UnsupportedModelError, match="puts something before the prompt"):
        tandem.Generator(get_peft_model(model, prompt))


@needs_peft
def test_a_model_with_adapters_is_packed_after_they_are_merged(model: Any, tmp_path: Path) -> None:
    first = adapted(model, target_modules=["q_proj"])
    expected = with_transformers(first)
    with pytest.raises(ModelError, match=r"with adapters, .*write model\.merge_and_unload"):
        tandem.save(first, tmp_path / "packed")
    tandem.save(first.merge_and_unload(), tmp_path / "packed")
    assert with_transformers(tandem.load(tmp_path / "packed")) == expected


@pytest.mark.seam
def test_the_trainer_is_refused_in_our_words(model: Any, tmp_path: Path) -> None:
    from transformers import Trainer, TrainingArguments

    args = TrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to=[])
    with pytest.raises(ConfigError, match=r"cannot be trained.* without an OffloadConfig"):
        Trainer(model=model, args=args)
