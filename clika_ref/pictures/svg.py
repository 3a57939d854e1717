"""Pictures as SVG: boxes with tooltips, no scripts and no external resources."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape

from clika_ref.pictures.arrangement import Arrangement, Placed, Route, arrange, path_of
from clika_ref.pictures.drawing import Box, Drawing, Role
from clika_ref.pictures.style import (
    BAND_GROUND,
    COLOURS,
    FAINT,
    FLOAT_EDGE,
    FONT,
    FRAME,
    GROUP_GROUNDS,
    HEADER,
    INK,
    INTEGER_EDGE,
    LETTER,
    MARGIN,
    PADDING,
    ROW,
    SMALL,
    TITLE,
    labels_width,
    width_of_text,
)

HEADLINE, LEGEND_ROW, SWATCH = 17.0, 22.0, 13.0
"""Font size of the picture title, height of a legend row, and size of a legend swatch."""

INTEGERS_LEGEND = "a tensor read as integers"

SHEET = f"""
text {{ font-family: {FONT}; font-size: {LETTER:g}px; fill: {INK}; white-space: pre; }}
.headline {{ font-size: {HEADLINE:g}px; font-weight: bold; }}
.faint {{ fill: {FAINT}; }}
.kind {{ font-size: {TITLE:g}px; font-weight: bold; fill: #ffffff; }}
.badge {{ font-size: {SMALL:g}px; fill: #ffffff; }}
.edge {{ fill: none; stroke: {FLOAT_EDGE}; stroke-width: 1.4; }}
.integers {{ stroke: {INTEGER_EDGE}; stroke-width: 2.2; }}
.frame {{ stroke: {FRAME}; stroke-width: 1; }}
.band {{ fill: {BAND_GROUND}; }}
"""


def write_svg(drawing: Drawing) -> bytes:
    """Return a drawing as an SVG file."""
    whole = arrange(drawing)
    legend = list(_header(drawing))
    top = MARGIN * 2 + HEADLINE + LEGEND_ROW * (len(legend) - 1)
    width = round(max(whole.width, *(extent for extent, _ in legend)) + 2 * MARGIN, 1)
    height = round(top + whole.height + 2 * MARGIN, 1)
    size = f'width="{width}" height="{height}"'
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} viewBox="0 0 {width} {height}">',
        f"<title>{escape(drawing.title)}</title>",
        f"<style>{SHEET}</style>",
        *markers(),
        f'<rect {size} fill="#ffffff"/>',
        *(line for _, line in legend),
        f'<g transform="translate({(width - whole.width) / 2:.9g} {top:.9g})">',
        *content(whole),
        "</g>",
        "</svg>",
    ]
    return ("\n".join(lines) + "\n").encode()


def markers() -> Iterator[str]:
    """Yield the arrowheads of edges."""
    yield "<defs>"
    for name, colour in (("tip", FLOAT_EDGE), ("tip-integers", INTEGER_EDGE)):
        yield (
            f'<marker id="{name}" viewBox="0 0 8 8" refX="7.5" refY="4" markerWidth="8" markerHeight="8" '
            f'markerUnits="userSpaceOnUse" orient="auto"><path d="M0 0.5L8 4L0 7.5z" fill="{colour}"/></marker>'
        )
    yield "</defs>"


def _header(drawing: Drawing) -> Iterator[tuple[float, str]]:
    """Yield the width and SVG of the title line and of each legend row."""
    y = MARGIN + HEADLINE
    title, rest = escape(drawing.title), escape(drawing.subtitle)
    line = f'<tspan class="headline">{title}</tspan><tspan class="faint" dx="{MARGIN:g}">{rest}</tspan>'
    extent = width_of_text(drawing.title, HEADLINE) + MARGIN + width_of_text(drawing.subtitle)
    yield extent, f'<text x="{MARGIN:g}" y="{y:g}">{line}</text>'
    behind = MARGIN + SWATCH + PADDING
    for mark, text in _legend(drawing):
        y += LEGEND_ROW
        shown = f'<g transform="translate({MARGIN:g} {y - SWATCH + 2:g})">{mark}</g>'
        yield behind + width_of_text(text), f'{shown}<text x="{behind:g}" y="{y:g}">{text}</text>'


def _legend(drawing: Drawing) -> Iterator[tuple[str, str]]:
    """Yield the mark and the text of each color in use."""
    for role in drawing.roles:
        yield f'<rect width="{SWATCH:g}" height="{SWATCH:g}" rx="2" fill="{COLOURS[role].title}"/>', role.value
    if drawing.has_integers:
        yield f'<path class="edge integers" d="M0 {SWATCH / 2:g}h{SWATCH:g}"/>', INTEGERS_LEGEND


def content(found: Arrangement, depth: int = 0) -> Iterator[str]:
    """Yield the SVG of a group: edges first, then members on top."""
    for number, route in enumerate(found.routes):
        yield _route(found, route, number)
    for member in found.members:
        place = f'transform="translate({member.x:.9g} {member.y:.9g})"'
        if isinstance(member.content, Box):
            yield from _box(member.content, member, place)
        else:
            yield from _group(member.content, place, depth)


def _route(found: Arrangement, route: Route, number: int) -> str:
    line = "".join(
        f"{letter}{' '.join(f'{value:.9g}' for value in values)}" for letter, values in path_of(found, route)
    )
    kind, tip = ("edge integers", "tip-integers") if route.edge.is_integers else ("edge", "tip")
    ends_at_box = route.target is not None and isinstance(found.members[route.target].content, Box)
    marker = f' marker-end="url(#{tip})"' if ends_at_box else ""
    return (
        f'<path class="{kind}" data-way="{number}" d="{line}"{marker}>'
        f"<title>{escape(route.edge.carries)}\n{escape(route.edge.text)}</title></path>"
    )


def _group(inner: Arrangement, place: str, depth: int) -> Iterator[str]:
    title = escape(inner.group.title)
    width, height = inner.width, inner.height
    ground = GROUP_GROUNDS[depth % len(GROUP_GROUNDS)]
    yield f'<g class="group" data-key="{escape(inner.group.key)}" {place}>'
    yield f'<rect class="frame ground" width="{width:.9g}" height="{height:.9g}" rx="6" fill="{ground}"/>'
    yield '<g class="members">'
    yield from content(inner, depth + 1)
    yield "</g>"
    yield f'<g class="title"><rect class="frame band" width="{width:.9g}" height="{inner.band:.9g}" rx="6"/>'
    yield f'<text x="{PADDING:.9g}" y="{inner.band - 8:.9g}">{title}</text>'
    yield f"<title>{title}</title></g></g>"


def _box(box: Box, member: Placed, place: str) -> Iterator[str]:
    colours, width, height = COLOURS[box.role], member.width, member.height
    yield f'<g class="box" data-key="{escape(box.key)}" data-role="{box.role.name.lower()}" {place}>'
    yield f"<title>{escape(box.told)}</title>"
    yield (
        f'<rect class="ground" width="{width:.9g}" height="{height:.9g}" rx="5" fill="{colours.ground}" '
        f'stroke="{colours.title}" stroke-width="{2 if box.role is Role.INTERFACE else 1}"/>'
    )
    corners = f"M0 {HEADER:g}V5a5 5 0 0 1 5 -5H{width - 5:.9g}a5 5 0 0 1 5 5V{HEADER:g}z"
    yield f'<path d="{corners}" fill="{colours.title}"/>'
    yield f'<text class="kind" x="{PADDING:.9g}" y="{HEADER - 7:.9g}">{escape(box.kind)}</text>'
    if box.badge:
        x = width - PADDING
        yield f'<text class="badge" text-anchor="end" x="{x:.9g}" y="{HEADER - 7:.9g}">{escape(box.badge)}</text>'
    indent = PADDING + labels_width(box)
    for number, (label, text) in enumerate(box.rows, 1):
        y = HEADER + number * ROW
        faint = f'<tspan class="faint" x="{PADDING:.9g}">{escape(label)}</tspan>' if label else ""
        x = indent if label else PADDING
        yield f'<text y="{y:.9g}">{faint}<tspan x="{x:.9g}">{escape(text)}</tspan></text>'
    yield "</g>"
