"""Pictures as a self-contained HTML file with folding, panning, zooming and search."""

from __future__ import annotations

import json
from html import escape
from importlib.resources import files
from string import Template
from typing import Any

from clika_ref_visualize.pictures.arrangement import Arrangement, arrange
from clika_ref_visualize.pictures.drawing import Box, PictureDrawing
from clika_ref_visualize.pictures.style import GROUP_MARGIN, QUANTIZED_EDGE_COLOR, ROLE_COLORS
from clika_ref_visualize.pictures.svg import QUANTIZED_EDGE_LEGEND, STYLE_SHEET, render_contents, render_markers


def write_page(drawing: PictureDrawing) -> bytes:
    """Return a drawing as an HTML file."""
    arrangement = arrange(drawing)
    chips = [f'<span><i style="background:{ROLE_COLORS[role].title}"></i>{role.value}</span>' for role in drawing.roles]
    if drawing.has_quantized_edges:
        chips.append(
            f'<span><i class="line" style="background:{QUANTIZED_EDGE_COLOR}"></i>{QUANTIZED_EDGE_LEGEND}</span>'
        )
    page = Template(_read_asset("page.html")).substitute(
        title=escape(drawing.title),
        subtitle=escape(drawing.subtitle),
        style=f"{STYLE_SHEET}\n{_read_asset('page.css')}",
        legend="\n".join(chips),
        picture="\n".join([*render_markers(), '<g id="world">', *render_contents(arrangement), "</g>"]),
        layout=json.dumps(make_layout(arrangement), separators=(",", ":")).replace("</", "<\\/"),
        script=_read_asset("page.js"),
    )
    return page.encode()


def _read_asset(name: str) -> str:
    return files("clika_ref_visualize.pictures").joinpath("page", name).read_text(encoding="utf-8")


def make_layout(arrangement: Arrangement) -> dict[str, Any]:
    """Return the data that the page needs to redo a layout after folding: everything except the columns can move."""
    members: list[dict[str, Any]] = []
    for member in arrangement.members:
        inner = member.content
        entry: dict[str, Any] = {"layer": member.layer, "x": member.x}
        if isinstance(inner, Box):
            entry |= {"key": inner.key, "height": member.height}
        else:
            entry |= {"key": inner.group.key, "group": make_layout(inner)}
        members.append(entry)
    routes = [{"source": r.source, "target": r.target, "columns": r.columns} for r in arrangement.routes]
    return {
        "title": arrangement.group.title,
        "nodes": sum(1 for _ in arrangement.group.boxes()),
        "band": arrangement.title_height,
        "above": GROUP_MARGIN if arrangement.title_height and not arrangement.entries else 0,
        "below": GROUP_MARGIN if arrangement.title_height and not arrangement.exits else 0,
        "gaps": arrangement.gaps,
        "members": members,
        "routes": routes,
    }
