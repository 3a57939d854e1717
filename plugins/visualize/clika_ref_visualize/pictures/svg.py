"""Pictures as SVG: boxes with tooltips, no scripts and no external resources."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape

from clika_ref_visualize.pictures.arrangement import Arrangement, PlacedMember, Route, arrange, trace_route
from clika_ref_visualize.pictures.drawing import Box, PictureDrawing, Role
from clika_ref_visualize.pictures.style import (
    BADGE_FONT_SIZE,
    FAINT_COLOR,
    FLOAT_EDGE_COLOR,
    FONT,
    FRAME_COLOR,
    GROUP_COLORS,
    GROUP_MARGIN,
    GROUP_TITLE_COLOR,
    HEADER_HEIGHT,
    QUANTIZED_EDGE_COLOR,
    ROLE_COLORS,
    ROW_FONT_SIZE,
    ROW_HEIGHT,
    ROW_PADDING,
    TEXT_COLOR,
    TITLE_FONT_SIZE,
    measure_labels,
    measure_text,
)

HEADLINE_FONT_SIZE = 17.0
"""Of the title of the picture, in pixels."""

LEGEND_ROW_HEIGHT, SWATCH_SIZE = 22.0, 13.0
"""Height of a row of the legend, and size of its colored square."""

QUANTIZED_EDGE_LEGEND = "quantized tensor"

STYLE_SHEET = f"""
text {{ font-family: {FONT}; font-size: {ROW_FONT_SIZE:g}px; fill: {TEXT_COLOR}; white-space: pre; }}
.headline {{ font-size: {HEADLINE_FONT_SIZE:g}px; font-weight: bold; }}
.faint {{ fill: {FAINT_COLOR}; }}
.kind {{ font-size: {TITLE_FONT_SIZE:g}px; font-weight: bold; fill: #ffffff; }}
.badge {{ font-size: {BADGE_FONT_SIZE:g}px; fill: #ffffff; }}
.edge {{ fill: none; stroke: {FLOAT_EDGE_COLOR}; stroke-width: 1.4; }}
.edge.quantized {{ stroke: {QUANTIZED_EDGE_COLOR}; stroke-width: 2.2; }}
.frame {{ stroke: {FRAME_COLOR}; stroke-width: 1; }}
.band {{ fill: {GROUP_TITLE_COLOR}; }}
"""


def write_svg(drawing: PictureDrawing) -> bytes:
    """Return a drawing as an SVG file."""
    arrangement = arrange(drawing)
    header = list(_render_header(drawing))
    top = GROUP_MARGIN * 2 + HEADLINE_FONT_SIZE + LEGEND_ROW_HEIGHT * (len(header) - 1)
    width = round(max(arrangement.width, *(extent for extent, _ in header)) + 2 * GROUP_MARGIN, 1)
    height = round(top + arrangement.height + 2 * GROUP_MARGIN, 1)
    size = f'width="{width}" height="{height}"'
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} viewBox="0 0 {width} {height}">',
        f"<title>{escape(drawing.title)}</title>",
        f"<desc>{escape(drawing.subtitle)}</desc>",
        f"<style>{STYLE_SHEET}</style>",
        *render_markers(),
        f'<rect {size} fill="#ffffff"/>',
        *(line for _, line in header),
        f'<g transform="translate({(width - arrangement.width) / 2:.9g} {top:.9g})">',
        *render_contents(arrangement),
        "</g>",
        "</svg>",
    ]
    return ("\n".join(lines) + "\n").encode()


def render_markers() -> Iterator[str]:
    """Yield the definitions of the arrowheads of edges."""
    yield "<defs>"
    for name, color in (("tip", FLOAT_EDGE_COLOR), ("tip-quantized", QUANTIZED_EDGE_COLOR)):
        yield (
            f'<marker id="{name}" viewBox="0 0 8 8" refX="7.5" refY="4" markerWidth="8" markerHeight="8" '
            f'markerUnits="userSpaceOnUse" orient="auto"><path d="M0 0.5L8 4L0 7.5z" fill="{color}"/></marker>'
        )
    yield "</defs>"


def _render_header(drawing: PictureDrawing) -> Iterator[tuple[float, str]]:
    """Yield the width and SVG of the title line and of each legend row."""
    y = GROUP_MARGIN + HEADLINE_FONT_SIZE
    title, rest = escape(drawing.title), escape(drawing.subtitle)
    line = f'<tspan class="headline">{title}</tspan><tspan class="faint" dx="{GROUP_MARGIN:g}">{rest}</tspan>'
    extent = measure_text(drawing.title, HEADLINE_FONT_SIZE) + GROUP_MARGIN + measure_text(drawing.subtitle)
    yield extent, f'<text x="{GROUP_MARGIN:g}" y="{y:g}">{line}</text>'
    text_x = GROUP_MARGIN + SWATCH_SIZE + ROW_PADDING
    for mark, text in _render_legend(drawing):
        y += LEGEND_ROW_HEIGHT
        shown = f'<g transform="translate({GROUP_MARGIN:g} {y - SWATCH_SIZE + 2:g})">{mark}</g>'
        yield text_x + measure_text(text), f'{shown}<text x="{text_x:g}" y="{y:g}">{text}</text>'


def _render_legend(drawing: PictureDrawing) -> Iterator[tuple[str, str]]:
    """Yield the colored mark and the text of each legend row, for the colors in use."""
    for role in drawing.roles:
        yield (
            f'<rect width="{SWATCH_SIZE:g}" height="{SWATCH_SIZE:g}" rx="2" fill="{ROLE_COLORS[role].title}"/>',
            role.value,
        )
    if drawing.has_quantized_edges:
        yield f'<path class="edge quantized" d="M0 {SWATCH_SIZE / 2:g}h{SWATCH_SIZE:g}"/>', QUANTIZED_EDGE_LEGEND


def render_contents(arrangement: Arrangement, depth: int = 0) -> Iterator[str]:
    """Yield the SVG of a group: edges first, then members on top."""
    for number, route in enumerate(arrangement.routes):
        yield _render_route(arrangement, route, number)
    for member in arrangement.members:
        transform = f'transform="translate({member.x:.9g} {member.y:.9g})"'
        if isinstance(member.content, Box):
            yield from _render_box(member.content, member, transform)
        else:
            yield from _render_group(member.content, transform, depth)


def _render_route(arrangement: Arrangement, route: Route, number: int) -> str:
    line = "".join(
        f"{letter}{' '.join(f'{value:.9g}' for value in values)}" for letter, values in trace_route(arrangement, route)
    )
    kind, tip = ("edge quantized", "tip-quantized") if route.edge.is_quantized else ("edge", "tip")
    ends_at_box = route.target is not None and isinstance(arrangement.members[route.target].content, Box)
    marker = f' marker-end="url(#{tip})"' if ends_at_box else ""
    return (
        f'<path class="{kind}" data-route="{number}" d="{line}"{marker}>'
        f"<title>{escape(route.edge.tensor)}\n{escape(route.edge.text)}</title></path>"
    )


def _render_group(inner: Arrangement, transform: str, depth: int) -> Iterator[str]:
    title = escape(inner.group.title)
    width, height = inner.width, inner.height
    background = GROUP_COLORS[depth % len(GROUP_COLORS)]
    yield f'<g class="group" data-key="{escape(inner.group.key)}" {transform}>'
    yield f'<rect class="frame ground" width="{width:.9g}" height="{height:.9g}" rx="6" fill="{background}"/>'
    yield '<g class="members">'
    yield from render_contents(inner, depth + 1)
    yield "</g>"
    yield f'<g class="title"><rect class="frame band" width="{width:.9g}" height="{inner.title_height:.9g}" rx="6"/>'
    yield f'<text x="{ROW_PADDING:.9g}" y="{inner.title_height - 8:.9g}">{title}</text>'
    yield f"<title>{title}</title></g></g>"


def _render_box(box: Box, member: PlacedMember, transform: str) -> Iterator[str]:
    colors, width, height = ROLE_COLORS[box.role], member.width, member.height
    yield f'<g class="box" data-key="{escape(box.key)}" data-role="{box.role.name.lower()}" {transform}>'
    yield f"<title>{escape(box.tooltip)}</title>"
    yield (
        f'<rect class="ground" width="{width:.9g}" height="{height:.9g}" rx="5" fill="{colors.background}" '
        f'stroke="{colors.title}" stroke-width="{2 if box.role is Role.INTERFACE else 1}"/>'
    )
    corners = f"M0 {HEADER_HEIGHT:g}V5a5 5 0 0 1 5 -5H{width - 5:.9g}a5 5 0 0 1 5 5V{HEADER_HEIGHT:g}z"
    yield f'<path d="{corners}" fill="{colors.title}"/>'
    yield f'<text class="kind" x="{ROW_PADDING:.9g}" y="{HEADER_HEIGHT - 7:.9g}">{escape(box.kind)}</text>'
    if box.badge:
        x = width - ROW_PADDING
        y = HEADER_HEIGHT - 7
        yield f'<text class="badge" text-anchor="end" x="{x:.9g}" y="{y:.9g}">{escape(box.badge)}</text>'
    indent = ROW_PADDING + measure_labels(box)
    for number, (label, text) in enumerate(box.rows, 1):
        y = HEADER_HEIGHT + number * ROW_HEIGHT
        faint = f'<tspan class="faint" x="{ROW_PADDING:.9g}">{escape(label)}</tspan>' if label else ""
        x = indent if label else ROW_PADDING
        yield f'<text y="{y:.9g}">{faint}<tspan x="{x:.9g}">{escape(text)}</tspan></text>'
    yield "</g>"
