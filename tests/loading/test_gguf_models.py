"""Files that llama.cpp's own converter wrote: answers are what Transformers answered before.

`make_gguf_files` wrote them; all their weights are exact in Q8_0.
"""

import lzma
from pathlib import Path

import pytest
from safetensors.torch import load_file

import tandem
from tandem.checkpoint.sources.gguf_models import ARCHITECTURES
from tests.inside import runtime_in
from tests.loading.make_gguf_files import DATA, EXPECTED, MODELS, answers


def unpacked(name: str, directory: Path) -> Path:
    """Return a file of `make_gguf_files`."""
    file = directory / f"{name}.gguf"
    file.write_bytes(lzma.decompress((DATA / f"{name}.gguf.xz").read_bytes()))
    return file


def difference(model: object, name: str) -> float:
    """Return the relative difference of a model's logits from Transformers'."""
    expected = load_file(EXPECTED)[name]
    return ((answers(model) - expected).norm() / expected.norm()).item()


@pytest.mark.parametrize("name", MODELS)
def test_answers_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    file = unpacked(name, tmp_path)
    # Without a rounded activation, so that nothing hides in a tolerance.
    model = tandem.load(file, dtype="fp32", expert_dtype="fp32")
    assert difference(model, name) < 1e-4
    model = tandem.load(file, dtype="fp32", dense_dtype="auto")
    assert {layer.layout.format_name for layer in runtime_in(model).store} == {"int8-g32"}
    assert (
        difference(model, name) < 0.3
    )  # a near tie of a router or an indexer; other weights give 1


def test_every_architecture_has_a_file() -> None:
    older = {"qwen2moe", "qwen3moe", "minimax-m2", "llama", "olmoe", "gpt-oss", "glm4moe"}
    assert older | {"deepseek2"} | {name.partition(" ")[0] for name in MODELS} == set(ARCHITECTURES)
