"""Tests of errors in input and files: one sentence with found, expected and remedy."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

import tandem
from tandem.core.errors import ConfigError, ModelError, UnsupportedModelError
from tandem.hf.adapters.refused import REFUSED
from tandem.hf.config import OffloadConfig
from tandem.hf.load import empty_model
from tandem.hf.quantizer import OffloadQuantizer
from tests.hf.tiny import edit_json, save_tiny_checkpoint

pytestmark = pytest.mark.seam


Break = Callable[[Path], object]
INDEX = "model.safetensors.index.json"
CODE_OF_ITS_OWN = {"model_type": "mine", "auto_map": {"AutoConfig": "mine.Config"}}


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return save_tiny_checkpoint(tmp_path / "tiny")


def shards(checkpoint: Path) -> list[Path]:
    return sorted(checkpoint.glob("model-*.safetensors"))


def without(name: str) -> Break:
    return lambda checkpoint: (checkpoint / name).unlink()


def with_config(**changes: Any) -> Break:
    return lambda checkpoint: edit_json(checkpoint / "config.json", **changes)


def with_text(name: str, text: str) -> Break:
    return lambda checkpoint: (checkpoint / name).write_text(text)


def with_shard(content: bytes) -> Break:
    return lambda checkpoint: shards(checkpoint)[0].write_bytes(content)


def cut_short(checkpoint: Path) -> None:
    file = shards(checkpoint)[0]
    file.write_bytes(file.read_bytes()[:-10])


def without_tensor(part: str, *, is_named: bool = False) -> Break:
    """Remove the first tensor whose name contains `part`; the index may still name it."""

    def drop(checkpoint: Path) -> None:
        index = json.loads((checkpoint / INDEX).read_text())
        name = next(n for n in index["weight_map"] if part in n)
        shard = checkpoint / index["weight_map"][name]
        tensors = load_file(shard)
        del tensors[name]
        save_file(tensors, shard, metadata={"format": "pt"})
        if not is_named:
            del index["weight_map"][name]
            (checkpoint / INDEX).write_text(json.dumps(index))

    return drop


def with_a_tensor_twice(checkpoint: Path) -> None:
    first, second = shards(checkpoint)[:2]
    tensors = load_file(second)
    name, tensor = next(iter(load_file(first).items()))
    save_file(tensors | {name: tensor}, second, metadata={"format": "pt"})


def with_a_name_twice(checkpoint: Path) -> None:
    text = (checkpoint / INDEX).read_text()
    name = next(iter(json.loads(text)["weight_map"]))
    text = text.replace('"weight_map": {', f'"weight_map": {{"{name}": "other",')
    (checkpoint / INDEX).write_text(text)


GENERATION = "generation_config.json"
BROKEN: list[tuple[Break, str]] = [
    (without("config.json"), r"has no config\.json"),
    (with_text("config.json", "{"), "not valid JSON"),
    (without(INDEX), "has no weights"),
    (lambda checkpoint: shards(checkpoint)[1].unlink(), "lacks model-00002"),
    (cut_short, r"has \d+ bytes, expected \d+"),
    (with_shard(b""), "is damaged"),
    (with_shard(b"12345"), "is damaged"),
    (with_shard(b"\xff" * 64), "is damaged"),
    (with_shard(b"\x04" + b"\0" * 7 + b"nope"), "is damaged"),
    (without_tensor("q_proj", is_named=True), r"lacks tensor \S+q_proj"),
    (without_tensor("q_proj"), "lacks 1 of the model's weights"),
    (without_tensor("embed_tokens"), "lacks 1 of the model's weights"),
    (without_tensor("experts.3."), r"8 experts of model\.layers\.0"),
    (with_a_tensor_twice, r"has tensor \S+ twice, in .*download it again"),
    (with_a_name_twice, r"names (\S+) twice, as 'other' and as 'model-00"),
    (with_config(intermediate_size=96), r"has shape .* asks for"),
    (with_config(quantization_config={"quant_method": "gptq"}), "but no tensor is; use the config"),
    (
        with_config(vocab_size=200),
        r"(lm_head|embed_tokens)\.weight of shape \(128, 64\), .* \(200, 64\)",
    ),
    (
        with_config(num_attention_heads=2),
        r"[oq]_proj\.weight of shape \(64, 64\), .* \((64, 32|32, 64)\)",
    ),
    (with_text(GENERATION, "{"), "not valid JSON"),
    (with_text(GENERATION, "[]"), "holds a list, expected a JSON object"),
    (with_text(GENERATION, '{"eos_token_id": "x"}'), "eos_token_id is 'x', expected a token id"),
    (with_text(GENERATION, '{"temperature": "hot"}'), "temperature is 'hot', expected a number"),
]
FOREIGN: list[tuple[Break, str]] = [
    (with_config(model_type="mixtrall"), r"'mixtrall'.*did you mean 'mixtral'"),
    (
        with_config(quantization_config={"quant_method": "hqq"}),
        r"'hqq', which Tandem does not read.*gptq",
    ),
    (with_config(**CODE_OF_ITS_OWN), r"needs the code that.*trust_remote_code=True"),
]


@pytest.mark.parametrize(
    ("error", "spoil", "sentence"),
    [(ModelError, *case) for case in BROKEN] + [(UnsupportedModelError, *case) for case in FOREIGN],
)
def test_a_checkpoint_that_does_not_load(
    checkpoint: Path, error: type[ModelError], spoil: Break, sentence: str
) -> None:
    spoil(checkpoint)
    with pytest.raises(error, match=sentence):
        tandem.load(checkpoint)


def test_missing_directory() -> None:
    with pytest.raises(ModelError, match="no/such/place is not a directory"):
        tandem.load("/no/such/place")


def test_experts_outside_the_interface(tmp_path: Path) -> None:
    from transformers import JetMoeConfig, JetMoeForCausalLM

    config = JetMoeConfig(
        vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=1,
        num_key_value_heads=2, kv_channels=8, num_local_experts=4,
    )  # fmt: skip
    JetMoeForCausalLM(config).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError, match="outside Transformers' experts interface"):
        tandem.load(tmp_path)


def test_each_model_without_an_adapter_says_why() -> None:
    few = {
        f"{count}layers": 2 for count in ("num_", "encoder_", "decoder_", "num_hidden_")
    } | dict.fromkeys(("num_experts", "num_local_experts"), 4)
    heads = dict.fromkeys(("switch_transformers", "nllb_moe"), "ForConditionalGeneration")
    heads["vitpose_backbone"] = ""
    for name, why in REFUSED.items():
        config = AutoConfig.for_model(name.replace("nllb_", "nllb-"), **few)
        kind = type(config).__name__.removesuffix("Config")
        config.architectures = [kind + heads.get(name, "ForCausalLM")]
        with pytest.raises(UnsupportedModelError, match="keeps its experts outside.*: " + why):
            OffloadQuantizer(OffloadConfig()).announce_layers(empty_model(config))


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"expert_dtype": "bf61"}, r"expert_dtype is 'bf61'.*did you mean .*'bf16'"),
        ({"dtype": "bf61"}, r"dtype is 'bf61'.*did you mean .*'bf16'"),
        ({"expert_dtyp": "bf16"}, "unknown key 'expert_dtyp'; did you mean 'expert_dtype'"),
        ({"device_map": {"model": "cpu", "lm_head": "meta"}}, "spreads the model over"),
    ],
)
def test_options_that_cannot_be(checkpoint: Path, options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        tandem.load(checkpoint, **options)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"expert_dtypes": "bf16"}, "unknown key 'expert_dtypes'"),
        ({"packed_format": 99}, "packed in format 99"),
        ({"packed_format": 3, "expert_dtype": "iq2_xs+q2_k"}, "has iq2_xs.q2_k as format 3 had it"),
        ({"expert_formats": 5}, r"expert_formats is 5, expected list\[str\]"),
        ({"expert_formats": [5]}, r"expert_formats is \[5\], expected list\[str\]"),
        ({"dense_formats": {"a": 1}}, r"dense_formats is \{'a': 1\}, expected dict"),
        ({"threads": "many"}, "threads is 'many', expected int"),
    ],
)
def test_a_packed_config(
    checkpoint: Path, tmp_path: Path, changes: dict[str, object], sentence: str
) -> None:
    packed = tandem.save(tandem.load(checkpoint), tmp_path / "packed")
    config = json.loads((packed / "config.json").read_text())["quantization_config"]
    edit_json(packed / "config.json", quantization_config=config | changes)
    with pytest.raises(ConfigError, match=sentence):
        tandem.load(packed)


def test_experts_implementation_without_tandem_load(checkpoint: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(checkpoint)
    model.set_experts_implementation("tandem")
    with pytest.raises(ConfigError, match="did not load"):
        model(torch.tensor([[5, 6]]))


def test_a_config_with_which_no_prompt_runs(checkpoint: Path) -> None:
    edit_json(checkpoint / "config.json", sliding_window=-3)
    with pytest.raises(ModelError, match=r"cannot run a prompt with this config\.json: The size"):
        tandem.Generator(tandem.load(checkpoint)).generate([5, 6])


def test_more_layers_than_the_config_counts(checkpoint: Path, tmp_path: Path) -> None:
    edit_json(checkpoint / "config.json", num_hidden_layers=1)
    sentence = r"does not count: model\.layers\.1\..*, where it says 1 layers; use the config\.json"
    with pytest.raises(ModelError, match=sentence):
        tandem.load(checkpoint)
    edit_json(checkpoint / "config.json", num_nextn_predict_layers=3)  # of four in the file
    tandem.load(checkpoint)
