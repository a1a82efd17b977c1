"""Tiny checkpoints with a tokenizer, for tests that need files."""

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import tandem
from tests.architecture_sizes import VOCABULARY
from tests.architectures import build_tiny_dense_model, build_tiny_model, experts_modules

CHAT_TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token per byte below 128; other bytes are unknown tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())[: VOCABULARY - 4]
    vocabulary = {"<pad>": 0, "<s>": 1, "</s>": 2, "<unk>": 3}
    vocabulary |= {symbol: i + 4 for i, symbol in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>",
        unk_token="<unk>",
    )  # fmt: skip
    fast.chat_template = CHAT_TEMPLATE
    return fast


def save_tiny_checkpoint(directory: Path, name: str = "mixtral", **values: int) -> Path:
    """Write a tiny model of an architecture and its tokenizer, in several shards.

    `values` override config values.
    """
    build_tiny_model(name, values=values).save_pretrained(directory, max_shard_size="500KB")
    byte_tokenizer().save_pretrained(directory)
    return directory


def save_tiny_dense(directory: Path, name: str = "qwen3") -> Path:
    """Write a tiny model without experts, with its tokenizer."""
    build_tiny_dense_model(name).save_pretrained(directory)
    byte_tokenizer().save_pretrained(directory)
    return directory


def save_half_checkpoint(directory: Path) -> Path:
    """Write a tiny model in float16, which runs padded."""
    build_tiny_model("mixtral").half().save_pretrained(directory)
    byte_tokenizer().save_pretrained(directory)
    return directory


def loaded(folder: Path, name: str, **options: Any) -> Any:
    """A tiny model with all linear layers packed, whose answers are batch-invariant."""
    return load_packed(save_tiny_checkpoint(folder / "tiny", name), **options)


def load_packed(directory: Path, **options: Any) -> Any:
    """Load a tiny model and pack all linear layers that can be packed."""
    packed = {"dtype": "bfloat16", "expert_dtype": "int8-g32", "dense_dtype": "int8-g32"}
    model = tandem.load(directory, threads=1, **{**packed, **options})
    model.generation_config.eos_token_id = None
    return model


def as_generated(model: Any, folder: Path) -> Any:
    """Return a tiny model that slots serve, loaded by Tandem if it has adapters."""
    if experts_modules(model):
        return model
    model.save_pretrained(folder)
    return tandem.load(folder, dtype="float32")


def edit_json(file: Path, **changes: Any) -> None:
    """Change values of the object in a JSON file."""
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
