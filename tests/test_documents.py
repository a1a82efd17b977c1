"""Documents name things that exist."""

import importlib
import re
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parent.parent
ARCHITECTURE = (REPOSITORY / "docs" / "architecture.md").read_text(encoding="utf-8")
PACKAGE = REPOSITORY / "src" / "tandem"


@pytest.mark.parametrize("name", sorted(set(re.findall(r"`(tandem(?:\.\w+)+)`", ARCHITECTURE))))
def test_modules_in_architecture_exist(name: str) -> None:
    try:
        importlib.import_module(name)
    except ModuleNotFoundError:
        home, _, attribute = name.rpartition(".")
        assert hasattr(importlib.import_module(home), attribute), name


def test_architecture_has_a_sentence_for_every_package() -> None:
    packages = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    missing = {name for name in packages if f"tandem.{name}" not in ARCHITECTURE}
    assert missing == set()


@pytest.mark.parametrize("document", ["README.md", "CONTRIBUTING.md", "docs/architecture.md"])
def test_links_lead_somewhere(document: str) -> None:
    file = REPOSITORY / document
    links = re.findall(r"\]\((?!https?:)([^)#]+)", file.read_text(encoding="utf-8"))
    assert [link for link in links if not (file.parent / link).exists()] == []


def test_make_targets_in_readme_exist() -> None:
    readme = (REPOSITORY / "README.md").read_text(encoding="utf-8")
    makefile = (REPOSITORY / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"\bmake ([a-z-]+)", readme))
    assert targets >= {"run", "test"}
    assert {t for t in targets if f"\n{t}:" not in makefile} == set()
