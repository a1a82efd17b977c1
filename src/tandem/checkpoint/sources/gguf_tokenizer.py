"""The tokenizer and chat template that are in a GGUF file."""

from pathlib import Path
from typing import Any

from tandem.checkpoint.sources.gguf import read_gguf_header

# Transformers finds a tokenizer's class by the config that it reads; these it does not read, or
# not rightly (`gguf_config`), and their tokenizers need no class of their own.
_CONFIG_IS_OURS = ("olmoe", "gpt-oss", "deepseek2", "glm4moe")


def load_gguf_tokenizer(file: Path) -> Any:
    """Return the tokenizer of a file; raises what Transformers and tokenizers raise."""
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    is_ours = read_gguf_header(file).architecture in _CONFIG_IS_OURS
    kind = PreTrainedTokenizerFast if is_ours else AutoTokenizer
    return kind.from_pretrained(file.parent, gguf_file=file.name)


def save_gguf_tokenizer(file: Path, directory: Path) -> None:
    """Write a file's tokenizer to a directory, if there is one in the file."""
    if read_gguf_header(file).at("tokenizer.ggml.model") is not None:
        load_gguf_tokenizer(file).save_pretrained(directory)
