"""HTML report for humans: one self-contained file. A click on a cell opens its worst cases."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jinja2
import markupsafe

from clika_ref.serialization.atomic_files import write_atomically
from clika_ref_conformance.reporting.matrix import make_tabs, style_of
from clika_ref_conformance.reporting.report import Report

HTML_FILE = "index.html"

TEMPLATE_FOLDER = Path(__file__).with_name("pages")


def write_html(reports: Sequence[Report], path: Path, folders: Sequence[Path] = ()) -> None:
    """Write the matrix of one or several reports, next to each other.

    Args:
        reports: one for each target.
        path: the file to write.
        folders: folder of each report, with its reproducers; by default that of ``path``.

    Raises:
        ModelError: the path cannot be written.
    """
    path = path.absolute()
    locations = folders or [path.parent] * len(reports)
    with write_atomically(path) as file:
        page = render_html(reports, [Path(os.path.relpath(p, path.parent)).as_posix() for p in locations])
        file.write(page.encode(errors="backslashreplace"))  # a target's message may contain a lone surrogate


def render_html(reports: Sequence[Report], prefixes: Sequence[str]) -> str:
    """Return the page; a prefix is the path from the page to the folder of a report."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATE_FOLDER),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    tabs, cases = make_tabs(reports, prefixes)
    return environment.get_template("matrix.html.j2").render(
        reports=reports,
        tabs=tabs,
        data=_escape_script(cases),
        style=_read_asset("matrix.css"),
        script=_read_asset("matrix.js"),
        style_of=style_of,
    )


def _read_asset(name: str) -> markupsafe.Markup:
    return markupsafe.Markup((TEMPLATE_FOLDER / name).read_text(encoding="utf-8"))  # noqa: S704 - our own file


def _escape_script(document: Any) -> markupsafe.Markup:
    """Return JSON that cannot end its script element, for any texts."""
    text = json.dumps(document, allow_nan=False)
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return markupsafe.Markup(text)  # noqa: S704 - markup characters are escaped
