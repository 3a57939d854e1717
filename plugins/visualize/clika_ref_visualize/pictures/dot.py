"""Pictures as Graphviz text; Graphviz does the layout."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from clika_ref_visualize.pictures.drawing import Box, BoxGroup, PictureDrawing
from clika_ref_visualize.pictures.style import FLOAT_EDGE_COLOR, FRAME_COLOR, QUANTIZED_EDGE_COLOR, ROLE_COLORS


def write_dot(drawing: PictureDrawing) -> bytes:
    """Return a drawing as a Graphviz file: modules are clusters, and nodes are named ``n0``, ``n1``, ... in order."""
    names = {box.key: f"n{number}" for number, box in enumerate(drawing.root.boxes())}
    lines = [
        f"digraph {quote_string(drawing.title)} {{",
        f"  label={quote_string(f'{drawing.title}: {drawing.subtitle}')}; labelloc=t;",
        '  node [shape=box, style="filled,rounded", fontname="DejaVu Sans Mono", fontsize=10];',
        '  edge [fontname="DejaVu Sans Mono", fontsize=9];',
        *_write_members(drawing.root, names, "  ", iter(range(len(names) + 1))),
    ]
    for edge in drawing.edges:
        color, width = (QUANTIZED_EDGE_COLOR, 2) if edge.is_quantized else (FLOAT_EDGE_COLOR, 1)
        attributes = f'color="{color}", penwidth={width}, tooltip={quote_string(edge.text)}'
        lines.append(f"  {names[edge.source]} -> {names[edge.target]} [{attributes}];")
    return "\n".join([*lines, "}", ""]).encode()


def _write_members(group: BoxGroup, names: Mapping[str, str], indent: str, clusters: Iterator[int]) -> Iterator[str]:
    for member in group.members:
        if isinstance(member, Box):
            yield f"{indent}{names[member.key]} [{_format_box(member)}];"
        else:
            yield f"{indent}subgraph cluster_{next(clusters)} {{"
            yield f'{indent}  label={quote_string(member.title)}; color="{FRAME_COLOR}";'
            yield from _write_members(member, names, f"{indent}  ", clusters)
            yield f"{indent}}}"


def _format_box(box: Box) -> str:
    colors = ROLE_COLORS[box.role]
    title = f"{box.kind}  {box.badge}".rstrip()
    lines = [title, *(f"{label} {text}".strip() for label, text in box.rows)]
    label = "".join(f"{_escape(line)}\\l" for line in lines)  # \l: left-aligned
    return (
        f'label="{label}", color="{colors.title}", fillcolor="{colors.background}", tooltip={quote_string(box.tooltip)}'
    )


def _escape(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def quote_string(text: str) -> str:
    r"""Return a quoted DOT string.

    >>> print(quote_string('a "b" \\ c'))
    "a \"b\" \\ c"
    """
    return f'"{_escape(text)}"'
