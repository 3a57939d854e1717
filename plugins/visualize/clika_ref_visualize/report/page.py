"""Report contents as a self-contained HTML file."""

from __future__ import annotations

import json
from html import escape
from importlib.resources import files
from string import Template
from typing import Any

from clika_ref_visualize.report.contents import ReportContents

REPORT_SCRIPTS = ("formats.js", "drawing.js", "table.js", "hierarchy.js", "charts.js", "details.js", "sections.js")
"""In load order; later scripts may use the earlier ones."""


def render_report(contents: ReportContents) -> bytes:
    """Return a report as an HTML file.

    Names of modules, files and settings may contain any text, so the page treats them strictly as data.
    """
    page = Template(_read_asset("report.html")).substitute(
        title=escape(f"{contents.model} for {contents.target}"),
        style=_read_asset("report.css"),
        data=to_script_json(contents.to_json()),
        script="\n".join(map(_read_asset, REPORT_SCRIPTS)),
    )
    return page.encode(errors="replace")  # a lone surrogate in a name cannot be encoded


def to_script_json(data: Any) -> str:
    """Return data as JSON that an HTML parser never takes for the end or start of a script.

    >>> "<" in to_script_json({"name": "</script>"})
    False
    """
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _read_asset(name: str) -> str:
    return files("clika_ref_visualize.report").joinpath("assets", name).read_text(encoding="utf-8")
