"""Add linked files outside `docs/` to the site, as pages, so that no link is broken (hook of mkdocs).

`ARCHITECTURE.md`, `CONTRIBUTING.md` and `CHANGELOG.md` become pages under their names, other files and folders pages
below `source/`. Links lead to files of the repository, and are rewritten here.
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
    """Add a page for each linked document, file and folder outside ``docs/``."""
    for name in COPIED_PAGES:
        files.append(File.generated(config, page_path(name), content=(ROOT / name).read_text(encoding="utf-8")))
    written = [
        *COPIED_PAGES,
        *(f"docs/{file.src_uri}" for file in files.documentation_pages() if not file.generated_by),
    ]
    linked = {path for name in written for path in find_outside_paths(name)}
    for path in sorted(linked):
        shown = File.generated(
            config, page_path(path), content=write_source_page(path), inclusion=InclusionLevel.NOT_IN_NAV
        )
        files.append(shown)
    return files


def on_page_markdown(
    markdown: str,
    page: Page,
    config: MkDocsConfig,  # noqa: ARG001 - mkdocs passes them by name
    files: Files,  # noqa: ARG001
) -> str:
    """Replace the path of each link with that of the page of the file."""
    page_uri = page.file.src_uri
    name = next((page_name for page_name in COPIED_PAGES if page_path(page_name) == page_uri), f"docs/{page_uri}")

    def rewrite_link(link: re.Match[str]) -> str:
        path = resolve_link(name, link[2])
        if path is None:
            return link[0]
        return link[1] + os.path.relpath(page_path(path), PurePosixPath(page_uri).parent).replace(os.sep, "/") + link[3]

    return LINK.sub(rewrite_link, markdown)


def find_outside_paths(name: str) -> Iterator[str]:
    """Yield the linked paths of a document that have no page in ``docs/``."""
    for link in LINK.finditer((ROOT / name).read_text(encoding="utf-8")):
        path = resolve_link(name, link[2])
        if path is not None and path not in COPIED_PAGES and not path.startswith("docs/"):
            yield path


def resolve_link(name: str, link: str) -> str | None:
    """Return the target of a link as a path from the root, None if it does not exist."""
    path = PurePosixPath(os.path.normpath(PurePosixPath(name).parent / link)).as_posix()
    return path if not path.startswith("..") and (ROOT / path).exists() else None


def page_path(path: str) -> str:
    """Return the path in the site of the page of a file."""
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    return path.lower() if path in COPIED_PAGES else f"source/{path}.md"


def write_source_page(path: str) -> str:
    """Return a page with the text of a file, or a list of the files of a folder."""
    head = f"---\nsearch:\n  exclude: true\n---\n\n# `{path}`\n\n"
    file_path = ROOT / path
    if file_path.is_dir():
        return (
            head
            + "\n".join(f"- `{file.name}`: {read_first_line(file)}" for file in sorted(file_path.glob("*.py")))
            + "\n"
        )
    language = {".py": "python", ".toml": "toml"}.get(file_path.suffix, "text")
    return f"{head}`````{language}\n{file_path.read_text(encoding='utf-8')}`````\n"


def read_first_line(file: Path) -> str:
    """Return the first line of the docstring of a Python file."""
    return (ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or "").partition("\n")[0]
