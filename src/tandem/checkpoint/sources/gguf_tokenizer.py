"""The tokenizer and chat template that are in a GGUF file."""

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tandem.checkpoint.config_values import foreign_errors
from tandem.checkpoint.sources.gguf import read_gguf_header

# Architectures whose config Transformers reads.
_READ_BY_TRANSFORMERS = ("qwen2moe", "qwen3moe", "minimax-m2")


def load_gguf_tokenizer(file: Path) -> Any:
    """Return the tokenizer of a file; raises what Transformers and tokenizers raise.

    Transformers finds its class by the config that it reads; where it reads none, the tokenizer
    needs no class of its own. It would take a tokenizer.json beside the file instead, whatever
    model that is of, so it sees the file alone.
    """
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    is_ours = read_gguf_header(file).architecture not in _READ_BY_TRANSFORMERS
    kind = PreTrainedTokenizerFast if is_ours else AutoTokenizer
    with TemporaryDirectory() as directory:
        (Path(directory) / file.name).symlink_to(file.resolve())
        tokenizer = kind.from_pretrained(directory, gguf_file=file.name, local_files_only=True)
    tokenizer.name_or_path = str(file)
    return tokenizer


def save_gguf_tokenizer(file: Path, directory: Path) -> None:
    """Write a file's tokenizer to a directory, if there is one in the file; raises `ModelError`."""
    if read_gguf_header(file).at("tokenizer.ggml.model") is None:
        return
    with foreign_errors(f"{file} has no tokenizer that loads"):
        load_gguf_tokenizer(file).save_pretrained(directory)
