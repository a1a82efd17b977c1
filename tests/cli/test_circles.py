"""The commands' modules import each other in one direction, inside functions too."""

import ast
from graphlib import TopologicalSorter
from pathlib import Path

import tandem.cli

PACKAGE = Path(tandem.cli.__file__).parent


def imported_by(file: Path) -> set[str]:
    """Return the modules of the package that a file imports, anywhere in it."""
    nodes = ast.walk(ast.parse(file.read_text(encoding="utf-8")))
    names = {node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)}
    return {name.removeprefix("tandem.cli.") for name in names if name.startswith("tandem.cli.")}


def test_no_two_modules_need_each_other() -> None:
    graph = {file.stem: imported_by(file) for file in PACKAGE.glob("*.py")}
    assert graph["run"] >= {"chat", "opening"}  # the names are found at all
    order = list(TopologicalSorter(graph).static_order())  # raises CycleError
    assert order.index("chat") < order.index("run")
