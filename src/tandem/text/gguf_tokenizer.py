"""The tokenizer and chat template in a GGUF file."""

from pathlib import Path
from tempfile import TemporaryDirectory

from tandem.checkpoint.config_values import foreign_errors
from tandem.checkpoint.sources.gguf import config_of, read_gguf_header
from tandem.core.errors import ModelError
from tandem.foreign_types import PreTrainedConfig, Tokenizer

# Text that tokenizers split differently: digits, runs of spaces and lines, marks, scripts, emoji.
# All characters are composed, because Qwen's tokenizers compose them, and some models use those
# classes anyway.
_PROBE = (
    "It's 1234567 + 0.5e-10 = ?  two   three\t\ttabs\n\n\n  def f(x):\r\n    return [x]*2; // "
    "Größe naïve Привет γεια مرحبا नमस्ते 你好。世界 こんにちは 안녕 🙂 "
)


def load_gguf_tokenizer(file: Path) -> Tokenizer:
    """Return a GGUF file's tokenizer; raises the exceptions of Transformers and tokenizers.

    The generic class uses the file's tokenizer unchanged; a model's own class would rebuild the
    pre-tokenizer from a copy. Transformers would prefer a tokenizer.json beside the file, even that
    of another model, so the file is loaded from a directory of its own.
    """
    from transformers import PreTrainedTokenizerFast

    with TemporaryDirectory() as directory:
        (Path(directory) / file.name).symlink_to(file.resolve())
        tokenizer = PreTrainedTokenizerFast.from_pretrained(
            directory, gguf_file=file.name, local_files_only=True
        )
    tokenizer.name_or_path = str(file)
    return tokenizer


def save_gguf_tokenizer(file: Path, directory: Path) -> None:
    """Write a GGUF file's tokenizer, if it has one, into the directory of a packed copy.

    Raises `ModelError` if the tokenizer does not load, or if Transformers would load a different
    tokenizer from the written files.
    """
    header = read_gguf_header(file)
    if header.at("tokenizer.ggml.model") is None:
        return
    with foreign_errors(f"{file} has no tokenizer that loads"):
        tokenizer = load_gguf_tokenizer(file)
        tokenizer.save_pretrained(directory)
        _require_same(tokenizer, directory, config_of(header))


def _require_same(tokenizer: Tokenizer, directory: Path, config: PreTrainedConfig) -> None:
    from transformers import AutoTokenizer

    copy = AutoTokenizer.from_pretrained(directory, config=config, local_files_only=True)
    for text in (_PROBE, *(f"a {token} b{token}\n" for token in tokenizer.all_special_tokens)):
        ids, found = (each(text)["input_ids"] for each in (tokenizer, copy))
        if ids != found or tokenizer.decode(ids) != copy.decode(ids):
            raise ModelError(
                f"{tokenizer.name_or_path} cannot be packed: Transformers loads a "
                f"{type(copy).__name__} from a packed copy, which makes other tokens of "
                f"{text[:30]!r} than the file's own tokenizer; run the file itself"
            )
