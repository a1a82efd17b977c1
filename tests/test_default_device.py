"""Tests that `torch.set_default_device` does not affect native calls, which take addresses."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import tandem
from tandem.generate.generator import Generator
from tandem.hf.dense import packed_layers
from tandem.kernels import memory
from tests.hf.tiny import save_tiny_checkpoint

SOURCE = Path(__file__).parents[1] / "src" / "tandem"
FACTORIES = {
    *("arange", "as_tensor", "empty", "empty_strided", "eye", "full", "linspace", "normal"),
    *("ones", "rand", "randint", "randn", "randperm", "tensor", "zeros"),
}


def calls_without_device(tree: ast.AST) -> Iterator[int]:
    """Yield the lines of calls such as torch.empty(3), which a default device would move."""
    for node in ast.walk(tree):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
            continue
        owner = node.func.value
        is_factory = isinstance(owner, ast.Name) and owner.id == "torch"
        names = {keyword.arg for keyword in node.keywords}
        if is_factory and node.func.attr in FACTORIES and not names & {"device", None}:
            yield node.lineno


def test_every_new_tensor_names_its_device() -> None:
    assert list(calls_without_device(ast.parse("torch.empty(3)")))
    found = [
        f"{path.relative_to(SOURCE)}:{line}"
        for path in SOURCE.rglob("*.py")
        for line in calls_without_device(ast.parse(path.read_text()))
    ]
    assert not found


def test_weights_are_allocated_in_memory_whatever_the_default(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(memory, "_rest", memory.allocate(0))
    with torch.device("meta"):
        assert memory.allocate(100).device.type == "cpu"
    assert memory.allocate(100).data_ptr() % 64 == 0


def test_a_packed_model_is_loaded_first_of_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = save_tiny_checkpoint(tmp_path / "tiny", "qwen3_moe")
    packed = tandem.load(checkpoint, expert_dtype="int8", dense_dtype="int8-g32", threads=1)
    directory = tandem.save(packed, tmp_path / "packed")
    monkeypatch.setattr(memory, "_rest", memory.allocate(0))  # as in a process that just began
    again = tandem.load(directory, threads=1)
    matrices = [layer.packed.matrix for _, layer in packed_layers(again)]
    assert {matrix.data.device.type for matrix in matrices} == {"cpu"}
    originals = [layer.packed.matrix for _, layer in packed_layers(packed)]
    assert all(torch.equal(a.data, b.data) for a, b in zip(matrices, originals, strict=True))


# For these models Transformers itself ignores the default.
@pytest.mark.parametrize("name", ["qwen3_moe", "deepseek_v3"])
def test_answers_do_not_depend_on_the_default_device(name: str, tmp_path: Path) -> None:
    model = tandem.load(save_tiny_checkpoint(tmp_path / "tiny", name), threads=1)
    generator = Generator(model, dense_dtype="int8-g32")
    prompts = [[40, 41, 42], list(range(50, 70))]
    expected = generator.generate(prompts, max_new_tokens=4)
    with torch.device("meta"):
        again = Generator(model).generate(prompts, max_new_tokens=4)
    assert [answer.token_ids for answer in again] == [answer.token_ids for answer in expected]
