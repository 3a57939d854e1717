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
    """Return the bytes of a self-contained HTML file that shows a drawing."""
    arrangement = arrange(drawing)
    legend = [
        f'<span><i style="background:{ROLE_COLORS[role].title}"></i>{role.value}</span>' for role in drawing.roles
    ]
    if drawing.has_quantized_edges:
        legend.append(
            f'<span><i class="line" style="background:{QUANTIZED_EDGE_COLOR}"></i>{QUANTIZED_EDGE_LEGEND}</span>'
        )
    page = Template(_read_asset("page.html")).substitute(
        title=escape(drawing.title),
        subtitle=escape(drawing.subtitle),
        style=f"{STYLE_SHEET}\n{_read_asset('page.css')}",
        legend="\n".join(legend),
        picture="\n".join([*render_markers(), '<g id="world">', *render_contents(arrangement), "</g>"]),
        layout=json.dumps(make_layout(arrangement), separators=(",", ":")).replace("</", "<\\/"),
        script=_read_asset("page.js"),
    )
    return page.encode()


def _read_asset(name: str) -> str:
    return files("clika_ref_visualize.pictures").joinpath("page", name).read_text(encoding="utf-8")


def make_layout(arrangement: Arrangement) -> dict[str, Any]:
    """Return the data that the page needs to lay out a group again after folding; columns keep their positions."""
    members: list[dict[str, Any]] = []
    for member in arrangement.members:
        content = member.content
        entry: dict[str, Any] = {"layer": member.layer, "x": member.x}
        if isinstance(content, Box):
            entry |= {"key": content.key, "height": member.height}
        else:
            entry |= {"key": content.group.key, "group": make_layout(content)}
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
