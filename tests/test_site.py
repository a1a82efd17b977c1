"""Tests of the site's parts; only `make docs` runs MkDocs itself."""

from typing import Any

import pytest
import yaml

from tests import site
from tests.conftest import REPOSITORY

CONFIG = yaml.safe_load((REPOSITORY / "mkdocs.yml").read_text(encoding="utf-8"))
DOCUMENTS = site.documents()


def pages(entry: Any) -> list[str]:
    """Return the pages of a part of the navigation."""
    if isinstance(entry, str):
        return [entry]
    parts = entry.values() if isinstance(entry, dict) else entry
    return [page for part in parts for page in pages(part)]


def test_the_navigation_has_four_parts_and_each_document_once() -> None:
    assert [next(iter(part)) for part in CONFIG["nav"]] == [
        "Run it", "Serve it", "Study it", "Build on it",
    ]  # fmt: skip
    expected = [*map(site.page_of, DOCUMENTS), "api/index.html"]
    assert sorted(pages(CONFIG["nav"])) == sorted(expected)


@pytest.mark.parametrize("document", DOCUMENTS)
def test_links_and_their_anchors_exist(document: str) -> None:
    for path, anchor in site.links(document):
        assert (REPOSITORY / path).is_file(), path
        assert not anchor or anchor in site.anchors(path), f"{path}#{anchor}"


def test_links_lead_from_page_to_page() -> None:
    text = "[a](../README.md#b), ![c](pictures/d.svg), [e](#f), [g](https://h), [i](../src/j.py)"
    expected = (
        "[a](index.md#b), ![c](pictures/d.svg), [e](#f), [g](https://h), [i](source/src/j.py.md)"
    )
    assert site.with_site_links(text, "docs/k.md") == expected
    assert site.with_site_links("[a](docs/b.md)", "README.md") == "[a](b.md)"
    text = "[a](../../CONTRIBUTING.md) [b](../c.md)"
    assert (
        site.with_site_links(text, "docs/decisions/0001-d.md")
        == "[a](../contributing.md) [b](../c.md)"
    )


def test_anchors_are_github_s() -> None:
    assert "gguf-files-llamacpp-as-referee" in site.anchors("docs/history/2026-11.md")
    assert "floors" in site.anchors("docs/architecture.md")


def test_pages_that_load_from_other_hosts_are_found() -> None:
    assert site.LOADED.findall('<script defer src="https://a.b/c.js">') != []
    assert site.LOADED.findall('<link rel=stylesheet href="//a.b/c.css">') != []
    assert site.LOADED.findall('<a href="https://a.b"><img src="pictures/d.svg">') == []
