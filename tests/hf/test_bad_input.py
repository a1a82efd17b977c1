"""What users and files get wrong: one sentence with what was found, expected and to do."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import tandem
from tandem.core.errors import ConfigError, ModelError, UnsupportedModelError
from tandem.hf.checkpoint import open_model
from tests.hf.tiny import save_tiny_checkpoint

pytestmark = pytest.mark.seam


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return save_tiny_checkpoint(tmp_path / "tiny")


def edit_json(file: Path, **changes: Any) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def shards(checkpoint: Path) -> list[Path]:
    return sorted(checkpoint.glob("model-*.safetensors"))


def test_missing_directory() -> None:
    with pytest.raises(ModelError, match="no/such/place is not a directory"):
        tandem.load("/no/such/place")


def test_missing_config(checkpoint: Path) -> None:
    (checkpoint / "config.json").unlink()
    with pytest.raises(ModelError, match=r"has no config\.json"):
        tandem.load(checkpoint)


def test_config_that_is_no_json(checkpoint: Path) -> None:
    (checkpoint / "config.json").write_text("{")
    with pytest.raises(ModelError, match="not valid JSON"):
        tandem.load(checkpoint)


def test_missing_weights(checkpoint: Path) -> None:
    (checkpoint / "model.safetensors.index.json").unlink()
    with pytest.raises(ModelError, match="has no weights"):
        tandem.load(checkpoint)


def test_missing_shard(checkpoint: Path) -> None:
    shards(checkpoint)[1].unlink()
    with pytest.raises(ModelError, match="lacks model-00002"):
        tandem.load(checkpoint)


def test_truncated_shard(checkpoint: Path) -> None:
    file = shards(checkpoint)[0]
    file.write_bytes(file.read_bytes()[:-10])
    with pytest.raises(ModelError, match=r"has \d+ bytes, expected \d+"):
        tandem.load(checkpoint)


@pytest.mark.parametrize("content", [b"", b"12345", b"\xff" * 64, b"\x04" + b"\0" * 7 + b"nope"])
def test_corrupted_shard(checkpoint: Path, content: bytes) -> None:
    shards(checkpoint)[0].write_bytes(content)
    with pytest.raises(ModelError, match="is damaged"):
        tandem.load(checkpoint)


def drop_tensor(checkpoint: Path, part: str) -> str:
    """Remove the first tensor whose name contains `part` from its shard and from the index."""
    index_file = checkpoint / "model.safetensors.index.json"
    index = json.loads(index_file.read_text())
    name = next(n for n in index["weight_map"] if part in n)
    shard = checkpoint / index["weight_map"].pop(name)
    tensors = load_file(shard)
    del tensors[name]
    save_file(tensors, shard, metadata={"format": "pt"})
    index_file.write_text(json.dumps(index))
    return str(name)


def test_tensor_missing_from_its_shard(checkpoint: Path) -> None:
    index_file = checkpoint / "model.safetensors.index.json"
    before = index_file.read_text()
    name = drop_tensor(checkpoint, "q_proj")
    index_file.write_text(before)
    with pytest.raises(ModelError, match=f"lacks tensor {name}"):
        tandem.load(checkpoint)


@pytest.mark.parametrize("part", ["q_proj", "embed_tokens"])
def test_missing_dense_tensor(checkpoint: Path, part: str) -> None:
    drop_tensor(checkpoint, part)
    with pytest.raises(ModelError, match="lacks 1 of the model's weights"):
        tandem.load(checkpoint)


def test_missing_expert(checkpoint: Path) -> None:
    drop_tensor(checkpoint, "experts.3.")
    with pytest.raises(ModelError, match=r"8 experts of model\.layers\.0"):
        tandem.load(checkpoint)


def test_experts_of_another_shape(checkpoint: Path) -> None:
    edit_json(checkpoint / "config.json", intermediate_size=96)
    with pytest.raises(ModelError, match=r"has shape .* asks for"):
        tandem.load(checkpoint)


def test_dense_model(tmp_path: Path) -> None:
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=2,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError, match=r"llama .* is a dense model"):
        tandem.load(tmp_path)
    with pytest.raises(UnsupportedModelError, match="is a dense model"):
        AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=tandem.OffloadConfig())


def test_experts_outside_the_interface(tmp_path: Path) -> None:
    from transformers import JetMoeConfig, JetMoeForCausalLM

    config = JetMoeConfig(
        vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=1,
        num_key_value_heads=2, kv_channels=8, num_local_experts=4,
    )  # fmt: skip
    JetMoeForCausalLM(config).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError, match="outside Transformers' experts interface"):
        tandem.load(tmp_path)


def test_unknown_model_type(checkpoint: Path) -> None:
    edit_json(checkpoint / "config.json", model_type="mixtrall")
    with pytest.raises(UnsupportedModelError, match=r"'mixtrall'.*did you mean 'mixtral'"):
        tandem.load(checkpoint)


def test_source_quantized_by_others(checkpoint: Path) -> None:
    edit_json(checkpoint / "config.json", quantization_config={"quant_method": "hqq"})
    with pytest.raises(UnsupportedModelError, match=r"'hqq', which Tandem does not read.*gptq"):
        tandem.load(checkpoint)


def test_config_of_a_quantized_model_beside_plain_weights(checkpoint: Path) -> None:
    edit_json(checkpoint / "config.json", quantization_config={"quant_method": "gptq"})
    with pytest.raises(ModelError, match="but no tensor is; use the config"):
        tandem.load(checkpoint)


def test_a_tensor_in_two_files(checkpoint: Path) -> None:
    first, second = shards(checkpoint)[:2]
    tensors = load_file(second)
    name, tensor = next(iter(load_file(first).items()))
    save_file(tensors | {name: tensor}, second, metadata={"format": "pt"})
    with pytest.raises(ModelError, match=f"has tensor {name} twice, in .*download it again"):
        tandem.load(checkpoint)


def test_an_index_that_names_a_tensor_twice(checkpoint: Path) -> None:
    index_file = checkpoint / "model.safetensors.index.json"
    name, shard = next(iter(json.loads(index_file.read_text())["weight_map"].items()))
    text = index_file.read_text().replace('"weight_map": {', f'"weight_map": {{"{name}": "other",')
    index_file.write_text(text)
    with pytest.raises(ModelError, match=f"names {name} twice, as 'other' and as '{shard}'"):
        tandem.load(checkpoint)


def test_code_that_comes_with_a_model(checkpoint: Path) -> None:
    edit_json(checkpoint / "config.json", model_type="mine", auto_map={"AutoConfig": "mine.Config"})
    with pytest.raises(UnsupportedModelError, match=r"needs the code that.*trust_remote_code=True"):
        tandem.load(checkpoint)


@pytest.mark.parametrize("field", ["expert_dtype", "dtype"])
def test_wrong_dtype_name(checkpoint: Path, field: str) -> None:
    options: dict[str, Any] = {field: "bf61"}
    with pytest.raises(ConfigError, match=rf"{field} is 'bf61'.*did you mean .*'bf16'"):
        tandem.load(checkpoint, **options)


def test_unknown_option(checkpoint: Path) -> None:
    with pytest.raises(ConfigError, match="unknown key 'expert_dtyp'; did you mean 'expert_dtype'"):
        tandem.load(checkpoint, expert_dtyp="bf16")


def test_packed_config_with_an_unknown_key(checkpoint: Path, tmp_path: Path) -> None:
    packed = tandem.save(tandem.load(checkpoint), tmp_path / "packed")
    config = json.loads((packed / "config.json").read_text())["quantization_config"]
    edit_json(packed / "config.json", quantization_config=config | {"expert_dtypes": "bf16"})
    with pytest.raises(ConfigError, match="unknown key 'expert_dtypes'"):
        tandem.load(packed)


def test_packed_format_of_the_future(checkpoint: Path, tmp_path: Path) -> None:
    packed = tandem.save(tandem.load(checkpoint), tmp_path / "packed")
    config = json.loads((packed / "config.json").read_text())["quantization_config"]
    edit_json(packed / "config.json", quantization_config=config | {"packed_format": 99})
    with pytest.raises(ConfigError, match="packed in format 99"):
        tandem.load(packed)


def test_device_map_over_several_devices(checkpoint: Path) -> None:
    with pytest.raises(ConfigError, match="spreads the model over"):
        tandem.load(checkpoint, device_map={"model": "cpu", "lm_head": "meta"})


def test_experts_implementation_without_tandem_load(checkpoint: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(checkpoint)
    model.set_experts_implementation("tandem")
    with pytest.raises(ConfigError, match="did not load"):
        model(torch.tensor([[5, 6]]))


@pytest.mark.parametrize(
    ("field", "value", "sentence"),
    [
        ("hidden_size", "big", "hidden_size is 'big', expected a whole number from 1"),
        ("num_hidden_layers", -2, "num_hidden_layers is -2, expected a whole number from 1"),
        ("num_key_value_heads", 0, "num_key_value_heads is 0, expected a whole number from 1"),
        ("num_experts_per_tok", 99, "is 99 and num_local_experts is 8, expected 1 to 8 experts"),
        ("num_experts_per_tok", 0, "is 0 and num_local_experts is 8, expected 1 to 8 experts"),
        ("num_local_experts", 0, "is 2 and num_local_experts is 0, expected 0 to 0 experts"),
        ("hidden_act", "sillu", "'sillu', which Transformers does not know; did you mean 'silu'"),
        ("hidden_act", 7, "config.json cannot be a mixtral's: .*'hidden_act'.* got int"),
        ("rms_norm_eps", "x", "config.json cannot be a mixtral's: .*'rms_norm_eps'.* got str"),
    ],
)
def test_values_that_no_model_can_have(
    checkpoint: Path, field: str, value: object, sentence: str
) -> None:
    edit_json(checkpoint / "config.json", **{field: value})
    with pytest.raises(ModelError, match=sentence):
        open_model(checkpoint)


def test_a_config_with_which_no_prompt_runs(checkpoint: Path) -> None:
    edit_json(checkpoint / "config.json", sliding_window=-3)
    with pytest.raises(ModelError, match=r"cannot run a prompt with this config\.json: The size"):
        tandem.Generator(tandem.load(checkpoint)).generate([5, 6])


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (
            {"vocab_size": 200},
            r"(lm_head|embed_tokens)\.weight of shape \(128, 64\), .* \(200, 64\)",
        ),
        (
            {"num_attention_heads": 2},
            r"[oq]_proj\.weight of shape \(64, 64\), .* \((64, 32|32, 64)\)",
        ),
    ],
)
def test_weights_of_another_shape(checkpoint: Path, changes: dict[str, int], sentence: str) -> None:
    edit_json(checkpoint / "config.json", **changes)
    with pytest.raises(ModelError, match=sentence):
        tandem.load(checkpoint)


def test_more_layers_than_the_config_counts(checkpoint: Path, tmp_path: Path) -> None:
    edit_json(checkpoint / "config.json", num_hidden_layers=1)
    sentence = r"does not count: model\.layers\.1\..*, where it says 1 layers; use the config\.json"
    with pytest.raises(ModelError, match=sentence):
        tandem.load(checkpoint)
    edit_json(checkpoint / "config.json", num_nextn_predict_layers=3)  # of four in the file
    tandem.load(checkpoint)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("{", "not valid JSON"),
        ("[]", "holds a list, expected a JSON object"),
        ('{"eos_token_id": "x"}', "eos_token_id is 'x', expected a token id"),
        ('{"temperature": "hot"}', "temperature is 'hot', expected a number"),
    ],
)
def test_a_generation_config_that_cannot_be_read(
    checkpoint: Path, text: str, sentence: str
) -> None:
    (checkpoint / "generation_config.json").write_text(text)
    with pytest.raises(ModelError, match=sentence):
        tandem.load(checkpoint)
