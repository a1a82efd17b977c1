"""The kinds of damaged files, and what is tried with each: loading, and a prompt."""

import random
import shutil
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

import tandem
from tandem.checkpoint.sources.gguf_header import read_header
from tandem.cli.model_choice import ModelChoice, import_transformers, load_tokenizer
from tandem.core.errors import TandemError
from tests.fuzz.mutations import mutate_headed_json, mutate_json, mutate_words
from tests.hf.tiny import save_tiny_checkpoint
from tests.loading.checkpoints import FORMATS, write_plain, write_quantised
from tests.loading.gguf_files import tiny_model, write_gguf
from tests.loading.test_gguf_commands import add_tokenizer

LONGEST_SENTENCE = 2000
_PROMPT = [5, 6, 7]
_TEXT = "Hello you, 1 + 1 = 2\n"


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of file: the model's file, the part that is damaged, and how."""

    file: Path
    seed: bytes
    """The undamaged bytes of the part to damage."""
    rest: bytes
    """The bytes after the part in the file."""
    mutate: Callable[[bytes, random.Random], bytes]
    load: Callable[[], object]

    def answer(self, data: bytes) -> str:
        """Try a damaged file; return "read" or the error's class. Other exceptions are findings."""
        self.file.write_bytes(data + self.rest)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                self.load()
        except TandemError as error:
            sentence = str(error)
            assert 0 < len(sentence) < LONGEST_SENTENCE, sentence
            assert "\n" not in sentence, sentence
            return type(error).__name__
        return "read"


def kinds(directory: Path) -> Mapping[str, Kind]:
    """Write tiny models into a directory; return the kinds by name."""
    import_transformers(quiet=True)
    torch.set_num_threads(1)
    sharded = save_tiny_checkpoint(directory / "sharded", num_hidden_layers=1)
    whole = save_tiny_checkpoint(directory / "whole", num_hidden_layers=1, hidden_size=32)
    _join(sharded, whole)
    gguf = directory / "gguf" / "whole.gguf"
    gguf.parent.mkdir()
    write_gguf(gguf, tiny_model(sizes={"num_hidden_layers": 1}), "Q4_0", also=add_tokenizer)
    header = read_header(gguf)
    length = min(tensor.data_offset for tensor in header.tensors.values())
    data, keys = gguf.read_bytes(), [*header.fields, *header.tensors]
    safetensors = whole / "model.safetensors"
    head = 8 + int.from_bytes(safetensors.read_bytes()[:8], "little")
    found = {
        "safetensors": _kind(safetensors, mutate_headed_json, partial(_run, whole), head),
        "index": _json(sharded / "model.safetensors.index.json", partial(_run, sharded)),
        "config": _json(
            _copy(whole, "config") / "config.json", partial(_run, directory / "config")
        ),
        "generation": _json(
            _copy(whole, "generation") / "generation_config.json",
            partial(_run, directory / "generation"),
        ),
    }
    packed = tandem.save(tandem.load(whole, expert_dtype="int4"), directory / "packed")
    found["packed"] = _json(packed / "config.json", partial(_run, packed))
    indexed = _copy(packed, "packed_index") / "tandem.safetensors.index.json"
    found["packed_index"] = _json(indexed, partial(_run, indexed.parent))
    architecture = FORMATS["gptq"].architecture
    plain = write_plain(directory / "plain", architecture, num_hidden_layers=1)
    gptq = write_quantised(directory / "gptq", plain, FORMATS["gptq"])
    found["quantised"] = _json(gptq / "config.json", partial(_run, gptq))
    words = partial(mutate_words, keys=[key.encode() for key in keys])
    found["gguf"] = Kind(
        gguf.with_name("tiny.gguf"), data[:length], data[length:], words,
        partial(_run, gguf.with_name("tiny.gguf"), has_tokenizer=True),
    )  # fmt: skip
    model = tandem.load(_copy(whole, "model"), threads=1)
    for name in ("tokenizer", "tokenizer_config"):
        at = _copy(whole, name)
        found[name] = _json(at / f"{name}.json", partial(_write, at, tandem.Generator(model)))
    return found


def _kind(
    file: Path,
    mutate: Callable[[bytes, random.Random], bytes],
    load: Callable[[], object],
    length: int | None = None,
) -> Kind:
    data = file.read_bytes()
    length = len(data) if length is None else length
    return Kind(file, data[:length], data[length:], mutate, load)


def _json(file: Path, load: Callable[[], object]) -> Kind:
    return _kind(file, mutate_json, load)


def _copy(model: Path, name: str) -> Path:
    target = model.with_name(name)
    shutil.copytree(model, target)
    return target


def _join(sharded: Path, whole: Path) -> None:
    """Check that the model is in one file, and the sharded copy in several."""
    files = sorted(whole.glob("*.safetensors"))
    assert [file.name for file in files] == ["model.safetensors"], files
    assert len(list(sharded.glob("*.safetensors"))) > 1


def _run(path: Path, *, has_tokenizer: bool = False) -> None:
    """Load a model and generate two tokens."""
    if has_tokenizer:
        load_tokenizer(ModelChoice(model=str(path)))
    model = tandem.load(path, threads=1)
    tandem.Generator(model).generate(_PROMPT, max_new_tokens=2, temperature=0)


def _write(directory: Path, generator: Any) -> None:
    """Load a tokenizer, format a text and a conversation, and generate an answer."""
    tokenizer = load_tokenizer(ModelChoice(model=str(directory)))
    ids = tokenizer(_TEXT)["input_ids"]
    tokenizer.decode(ids)
    if ids:
        generator.generate(ids[:16], max_new_tokens=1, temperature=0)
