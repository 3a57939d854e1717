"""Add linked files outside `docs/` to the site, as pages, so that no link is broken (hook of mkdocs).

`ARCHITECTURE.md`, `CONTRIBUTING.md` and `CHANGELOG.md` become pages under their names, other files and folders pages
below `source/`. Links are written as readers of the repository follow them, and rewritten here.
"""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[2]
COPIED_PAGES = ("ARCHITECTURE.md", "CHANGELOG.md", "CONTRIBUTING.md")
"""Documents outside ``docs/`` that are pages of the site."""

LINK = re.compile(r"(\]\()([^)#\s]+)([^)\s]*\))")
"""A Markdown link in three groups: the text before the path, the path, and the text after it."""


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add a page for each document, file and folder outside that is linked to."""
    for name in COPIED_PAGES:
        files.append(File.generated(config, page_of(name), content=(ROOT / name).read_text(encoding="utf-8")))
    written = [
        *COPIED_PAGES,
        *(f"docs/{file.src_uri}" for file in files.documentation_pages() if not file.generated_by),
    ]
    linked = {path for name in written for path in outside(name)}
    for path in sorted(linked):
        shown = File.generated(config, page_of(path), content=source_page(path), inclusion=InclusionLevel.NOT_IN_NAV)
        files.append(shown)
    return files


def on_page_markdown(
    markdown: str,
    page: Page,
    config: MkDocsConfig,  # noqa: ARG001 - mkdocs passes them by name
    files: Files,  # noqa: ARG001
) -> str:
    """Let each link lead to the page that its file has become."""
    place = page.file.src_uri
    name = next((page_name for page_name in COPIED_PAGES if page_of(page_name) == place), f"docs/{place}")

    def rewritten(link: re.Match[str]) -> str:
        path = resolved(name, link[2])
        if path is None:
            return link[0]
        return link[1] + os.path.relpath(page_of(path), PurePosixPath(place).parent).replace(os.sep, "/") + link[3]

    return LINK.sub(rewritten, markdown)


def outside(name: str) -> Iterator[str]:
    """Yield the paths that a document links to and that are no pages of their own."""
    for link in LINK.finditer((ROOT / name).read_text(encoding="utf-8")):
        path = resolved(name, link[2])
        if path is not None and path not in COPIED_PAGES and not path.startswith("docs/"):
            yield path


def resolved(name: str, link: str) -> str | None:
    """Return the path from the root that a link of a document leads to, None where there is nothing."""
    path = PurePosixPath(os.path.normpath(PurePosixPath(name).parent / link)).as_posix()
    return path if not path.startswith("..") and (ROOT / path).exists() else None


def page_of(path: str) -> str:
    """Return where in the site a path of the repository is shown."""
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    return path.lower() if path in COPIED_PAGES else f"source/{path}.md"


def source_page(path: str) -> str:
    """Return the page that shows a file, or what lies in a folder."""
    head = f"---\nsearch:\n  exclude: true\n---\n\n# `{path}`\n\n"
    place = ROOT / path
    if place.is_dir():
        return head + "\n".join(f"- `{file.name}`: {first_line(file)}" for file in sorted(place.glob("*.py"))) + "\n"
    language = {".py": "python", ".toml": "toml"}.get(place.suffix, "text")
    return f"{head}`````{language}\n{place.read_text(encoding='utf-8')}`````\n"


def first_line(file: Path) -> str:
    """Return the first line of the docstring of a Python file."""
    return (ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or "").partition("\n")[0]
