"""Tests of a loaded model as a Transformers model: beams, pipelines, threads, `torch.compile`."""

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, pipeline

import tandem
from tandem.core.errors import ConfigError
from tests.hf.tiny import save_tiny_checkpoint

IDS = torch.tensor([[20, 21, 22, 23]])
OPTIONS = {"max_new_tokens": 6, "min_new_tokens": 6, "pad_token_id": 0}


@pytest.fixture(scope="module")
def offloaded(checkpoint: Path) -> Any:
    config = tandem.OffloadConfig()
    return AutoModelForCausalLM.from_pretrained(
        checkpoint, quantization_config=config, dtype="float32"
    )


@pytest.fixture(scope="module")
def eager(checkpoint: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(
        checkpoint, experts_implementation="eager", dtype="float32"
    )


@pytest.mark.parametrize("name", ["auto", "balanced", "balanced_low_0", "sequential"])
def test_a_device_map_that_chooses_means_one_device(
    checkpoint: Path, eager: Any, tmp_path: Path, name: str
) -> None:
    config = tandem.OffloadConfig()
    kinds = {"dtype": "float32", "device_map": name}
    models = [
        AutoModelForCausalLM.from_pretrained(checkpoint, quantization_config=config, **kinds),
        tandem.load(checkpoint, **kinds),  # type: ignore[arg-type]
    ]
    packed = tandem.save(models[0], tmp_path / "packed")
    models += [AutoModelForCausalLM.from_pretrained(packed, device_map=name)]
    models += [tandem.load(packed, device_map=name)]
    with torch.no_grad():
        expected = eager(IDS).logits
        for model in models:
            there = model.device
            assert there.type == ("cuda" if torch.cuda.is_available() else "cpu")
            found = model(IDS.to(there)).logits.cpu()
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("options", [{"num_beams": 3}, {"do_sample": True}, {}])
def test_searches_find_what_eager_finds(
    offloaded: Any, eager: Any, options: dict[str, Any]
) -> None:
    found = []
    for model in (offloaded, eager):
        torch.manual_seed(0)
        found.append(model.generate(IDS, **OPTIONS, **options))
    assert torch.equal(*found)


def test_assisted_decoding_changes_nothing(offloaded: Any, eager: Any) -> None:
    found = offloaded.generate(IDS, assistant_model=eager, **OPTIONS)
    assert torch.equal(found, eager.generate(IDS, **OPTIONS))


def test_left_padding_is_masked(offloaded: Any, eager: Any) -> None:
    ids = torch.tensor([[0, 0, 22, 23], [20, 21, 22, 23]])
    options = {**OPTIONS, "attention_mask": torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]])}
    assert torch.equal(offloaded.generate(ids, **options), eager.generate(ids, **options))


def test_a_pipeline_takes_it(offloaded: Any, checkpoint: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    answer = pipeline("text-generation", model=offloaded, tokenizer=tokenizer)
    (result,) = answer("hello", max_new_tokens=4)
    assert result["generated_text"].startswith("hello")


@pytest.mark.parametrize(
    "options",
    [
        {"expert_dtype": "auto"},
        {"expert_dtype": "int8"},
        {"device": "emulated", "gpu_memory": "150kB", "profile": "laptop-8gb"},
    ],
)
def test_threads_do_not_disturb_each_other(checkpoint: Path, options: dict[str, Any]) -> None:
    model = tandem.load(checkpoint, dtype="float32", **options)
    prompts = [torch.tensor([[20 + i, 21, 22 + i, 23]]) for i in range(4)]
    with torch.no_grad():
        expected = [model(ids).logits for ids in prompts]
    wrong: list[int] = []

    def ask(number: int) -> None:
        for _ in range(30):
            with torch.no_grad():
                logits = model(prompts[number]).logits
            if not torch.allclose(logits, expected[number], atol=1e-4):
                wrong.append(number)

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_a_backward_pass_is_refused(offloaded: Any) -> None:
    loss = offloaded(IDS, labels=IDS).loss
    with pytest.raises(ConfigError, match="which have no gradients; train the model"):
        loss.backward()


@pytest.mark.slow
def test_a_compiled_model_answers_prompts_of_any_length(tmp_path: Path) -> None:
    checkpoint = save_tiny_checkpoint(tmp_path / "tiny", "qwen3_moe", num_hidden_layers=1)
    model = tandem.load(checkpoint, expert_dtype="int8")
    compiled: Any = torch.compile(model, backend="eager")
    for length in (5, 9):  # from the second on Dynamo traces with lengths as symbols
        ids = torch.arange(10, 10 + length)[None]
        with torch.no_grad():
            found, expected = compiled(input_ids=ids).logits, model(input_ids=ids).logits
        torch.testing.assert_close(found, expected)
