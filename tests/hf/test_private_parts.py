"""Tests that private names of Transformers and torch are used in only two files."""

import ast
from collections.abc import Iterator
from itertools import product
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "src" / "tandem"
HOMES = {"hf/compat.py", "kernels/torch_private.py"}
PUBLIC = {"_replace", "_asdict", "_fields", "_make"}  # of a NamedTuple, by Python's documentation
ELSEWHERE = {
    # argparse provides its flags and groups nowhere else
    ("cli/completion.py", "_actions"),
    *product(("cli/parser.py",), ("_actions", "_action_groups", "_group_actions")),
    *product(("core/config.py",), ("_ArgumentGroup", "_action_groups")),
    # public despite its name: ends a process at once
    *product(("engine/engine.py", "engine/helper.py"), ("_exit",)),
    # Triton's interpreter has a fast path for these functions only; a kernel cannot import them
    *product(
        (
            f"triton_kernels/{name}.py"
            for name in (
                *("attention", "compression", "hand_over", "hyper_connections", "recurrent"),
                *("index_keys", "prompt_attention", "small", "sorting", "vector", "windows"),
            )
        ),
        ("_sum_combine", "_elementwise_max", "_elementwise_min"),
    ),
}
_BY_NAME = {"getattr", "hasattr", "setattr", "delattr"}


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def own_names(tree: ast.AST) -> Iterator[str]:
    """Yield the names that a file defines: methods, fields, slots of `self`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            for part in node.body:
                if isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef):
                    yield part.name
                elif isinstance(part, ast.AnnAssign) and isinstance(part.target, ast.Name):
                    yield part.target.id
                elif isinstance(part, ast.Assign):
                    yield from (name.id for name in part.targets if isinstance(name, ast.Name))
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            owner = node.value
            yield from [node.attr] if isinstance(owner, ast.Name) and owner.id == "self" else []


def private_uses(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield (line, name) of private attributes, modules and names of other packages."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.expr | ast.stmt):
            continue
        names: list[str] = []
        if isinstance(node, ast.Attribute):
            names = [node.attr]
        elif isinstance(node, ast.ImportFrom) and not (node.module or "").startswith("tandem"):
            names = [*(node.module or "").split("."), *(alias.name for alias in node.names)]
        elif isinstance(node, ast.Import):
            names = [part for alias in node.names for part in alias.name.split(".")]
        elif isinstance(node, ast.Call) and len(node.args) > 1:
            attribute = node.args[1]
            is_by_name = isinstance(node.func, ast.Name) and node.func.id in _BY_NAME
            if (
                is_by_name
                and isinstance(attribute, ast.Constant)
                and isinstance(attribute.value, str)
            ):
                names = [attribute.value]
        yield from ((node.lineno, name) for name in names if is_private(name))


def foreign_uses(path: Path, own: set[str]) -> list[str]:
    tree, file = ast.parse(path.read_text(encoding="utf-8")), path.relative_to(SOURCE).as_posix()
    return [
        f"{file}:{line} {name}"
        for line, name in private_uses(tree)
        if name not in own | PUBLIC and (file, name) not in ELSEWHERE
    ]


def test_private_parts_of_others_are_named_in_their_homes_alone() -> None:
    files = sorted(SOURCE.rglob("*.py"))
    own = {name for path in files for name in own_names(ast.parse(path.read_text("utf-8")))}
    found = [use for path in files for use in foreign_uses(path, own)]
    assert [use for use in found if use.partition(":")[0] not in HOMES] == []
    assert {use.partition(":")[0] for use in found} == HOMES  # the test must find something


@pytest.mark.parametrize("home", sorted(HOMES))
def test_each_private_part_has_a_sentence_on_what_it_is(home: str) -> None:
    tree = ast.parse((SOURCE / home).read_text(encoding="utf-8"))
    for function in tree.body:
        if isinstance(function, ast.FunctionDef) and any(private_uses(function)):
            assert "today" in (ast.get_docstring(function) or ""), function.name


@pytest.mark.parametrize(
    ("code", "name"),
    [
        ("model._tied_weights_keys", "_tied_weights_keys"),
        ("import torch._C", "_C"),
        ("from torch.utils._pytree import tree_map", "_pytree"),
        ("from transformers.masking_utils import _ignore", "_ignore"),
        ("getattr(config, '_attn_implementation', None)", "_attn_implementation"),
        ("torch._dynamo.reset()", "_dynamo"),
    ],
)
def test_a_private_part_is_found(code: str, name: str) -> None:
    assert [found for _, found in private_uses(ast.parse(code))] == [name]


def test_attributes_of_our_own_objects_are_not_read_by_name() -> None:
    found = [
        f"{path.relative_to(SOURCE)}:{node.lineno}"
        for path in SOURCE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call)
        and ast.unparse(node.func) in ("getattr", "hasattr")
        and ast.unparse(node.args[0]) in ("self", "flags", "options", "runtime")
    ]
    assert found == []
