"""MkDocs hooks: pages outside docs/, links as GitHub resolves them, nothing from other hosts.

Documents link to each other and to code by repository paths. The site has README.md as its first
page, CONTRIBUTING.md and others beside it, and a page for each code file that a document names.
`python -m tests.api_reference` must have written the API reference into build/api. MkDocs is
imported only in the hooks that MkDocs calls.
"""

import os
import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

ROOT = Path(__file__).parents[1]
PAGES = {  # outside docs/
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "SECURITY.md": "security.md",
}
API = ROOT / "build" / "api"
LINK = re.compile(r"\]\((?!https?:|mailto:)([^)#\s]*)(#[^)\s]*)?\)")
CODE = re.compile(r"(?ms)^(```|~~~).*?^\1|`[^`\n]+`")
LOADED = re.compile(r"<(?:script|img|link|iframe)\b[^>]*?\b(?:src|href)=\"?(?:https?:)?//[^\s>]*")


def documents() -> list[str]:
    """Return the repository paths of all documents of the site."""
    return [*PAGES, *sorted(f.relative_to(ROOT).as_posix() for f in ROOT.glob("docs/**/*.md"))]


def links(document: str) -> Iterator[tuple[str, str]]:
    """Yield a document's links into the repository: a path, and an anchor or an empty string."""
    text = CODE.sub("", (ROOT / document).read_text(encoding="utf-8"))
    for path, anchor in LINK.findall(text):
        yield _resolved(document, path) if path else document, anchor[1:]


def anchors(document: str) -> set[str]:
    """Return the anchors of a document's headings, as GitHub and the site make them."""
    text = re.sub(r"(?ms)^(```|~~~).*?^\1", "", (ROOT / document).read_text(encoding="utf-8"))
    headings = re.findall(r"(?m)^#+ (.*)$", text)
    return {
        re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings
    }


def page_of(path: str) -> str:
    """Return the site's page of a repository file."""
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    return PAGES.get(path, f"source/{path}.md")


def with_site_links(markdown: str, document: str) -> str:
    """Return a document's text with links rewritten to pages of the site."""
    folder = PurePosixPath(page_of(document)).parent

    def replaced(match: re.Match[str]) -> str:
        if not match[1]:
            return match[0]
        target = page_of(_resolved(document, match[1]))
        return f"]({os.path.relpath(target, folder)}{match[2] or ''})"

    return LINK.sub(replaced, markdown)


def _resolved(document: str, path: str) -> str:
    return os.path.normpath(PurePosixPath(document).parent / path)


def on_config(config: Any) -> None:
    """Use GitHub's anchors for headings."""
    from pymdownx.slugs import slugify

    config.mdx_configs["toc"]["slugify"] = slugify(case="lower")


def on_files(files: Any, config: Any) -> None:
    """Add the pages outside docs/, the code files that documents name, and the API reference."""
    from mkdocs.structure.files import File

    texts = {page: (ROOT / path).read_text("utf-8") for path, page in PAGES.items()}
    named = {path for document in documents() for path, _ in links(document)}
    for path in sorted(named - {*PAGES}):
        if not path.startswith("docs/"):
            kind = Path(path).suffix.removeprefix(".")
            texts[page_of(path)] = (
                f"# {path}\n\n````{kind}\n{(ROOT / path).read_text('utf-8')}\n````\n"
            )
    for page, text in texts.items():
        files.append(File.generated(config, page, content=text))
    for file in sorted(API.rglob("*.*")):
        name = f"api/{file.relative_to(API).as_posix()}"
        files.append(File.generated(config, name, abs_src_path=str(file)))


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Rewrite links to pages of the site."""
    names = {page: path for path, page in PAGES.items()}
    uri = page.file.src_uri
    return (
        markdown
        if uri.startswith("source/")
        else with_site_links(markdown, names.get(uri, f"docs/{uri}"))
    )


def on_post_build(config: Any) -> None:
    """Refuse pages that load something from another host."""
    pages = Path(config.site_dir).rglob("*.html")
    loaded = {page.name: LOADED.findall(page.read_text("utf-8")) for page in pages}
    if foreign := {name: found for name, found in loaded.items() if found}:
        raise SystemExit(f"pages load from other hosts: {foreign}")
