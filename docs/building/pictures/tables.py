"""Tables of the product, and the page of a report, with recorded contents."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from clika_ref_visualize.pictures.drawing import Role
from clika_ref_visualize.pictures.style import FAINT_COLOR, FRAME_COLOR, ROLE_COLORS, TEXT_COLOR, measure_text
from clika_ref_visualize.report import page

from docs.building.pictures.canvas import LINE_HEIGHT, MARGIN, MAX_WIDTH, TOP, Canvas, wrap

COLUMN_GAP = 16.0
"""Distance of two columns of a table."""

STATE_ROLES = {
    "quantized": Role.QUANTIZED,
    "fused": Role.QUANTIZED,
    "weight_only": Role.WEIGHT_ONLY,
    "kept_in_float": Role.KEPT_IN_FLOAT,
    "not_quantized": Role.NOT_QUANTIZED,
    "float": Role.FLOAT,
}
"""Roles, and so colors, of the states of a node in a report."""

NOTE = "Separable, a network of 8 layers with random weights, for ONNX Runtime"


def draw_summary(facts: Mapping[str, Any]) -> bytes:
    """Return the printed form of ``module.clika_summary()``, with the color of each decision."""
    canvas = Canvas(
        "module.clika_summary()", f"The decision for each layer, and the results at other thresholds. {NOTE}."
    )

    def color_of(row: Sequence[str]) -> str:
        return ROLE_COLORS[Role.KEPT_IN_FLOAT if row[-1].startswith("float") else Role.QUANTIZED].title

    _draw_parts(canvas, facts["summary"], [color_of, lambda _: ""])
    return canvas.render()


def draw_explanation(facts: Mapping[str, Any]) -> bytes:
    """Return the printed form of ``module.clika_explain()``, with the color of each precision."""
    canvas = Canvas("module.clika_explain()", f"The planned and the real precision of each node. {NOTE}.")

    def color_of(row: Sequence[str]) -> str:
        planned, runs = row[3], row[4]
        if planned != "float":
            return ROLE_COLORS[Role.QUANTIZED if runs != "float" else Role.NOT_QUANTIZED].title
        return ROLE_COLORS[Role.KEPT_IN_FLOAT if row[2] else Role.FLOAT].title  # only layers have MACs

    _draw_parts(canvas, facts["explanation"], [color_of])
    return canvas.render()


def _draw_parts(canvas: Canvas, parts: Sequence[Any], colors: Sequence[Callable[[Sequence[str]], str]]) -> None:
    """Draw tables and lines below each other; each table has a function from a row to the color of its last cells."""
    canvas.text(MAX_WIDTH - MARGIN, MARGIN + 12, NOTE, color=FAINT_COLOR, anchor="end")
    y, remaining = TOP, iter(colors)
    for part in parts:
        if isinstance(part, str):
            canvas.text(MARGIN, y + 14, part)
            y += 22 if part else 14
        else:
            color_of = next(remaining)
            table = part["columns"], part["rows"]
            y = draw_table(canvas, MARGIN, y, table, colors=[*map(color_of, part["rows"])]) + 10


def draw_table(
    canvas: Canvas,
    x: float,
    y: float,
    table: tuple[Sequence[str], Sequence[Sequence[str]]],
    *,
    colors: Sequence[str],
    max_width: float = MAX_WIDTH - 2 * MARGIN,
) -> float:
    """Draw a table, with a mark for each row that has a color, and return the y coordinate below it.

    Numeric columns are right-aligned. The last column is wrapped to the remaining width.

    Args:
        canvas: the picture.
        x: left edge.
        y: top edge.
        table: the headings and the rows.
        colors: the color of each row; empty for none.
        max_width: the available width.
    """
    columns, rows = table
    widths = [max(map(measure_text, [name, *(row[i] for row in rows)])) for i, name in enumerate(columns)]
    widths[-1] = min(widths[-1], max_width - 12 - sum(widths[:-1]) - COLUMN_GAP * (len(columns) - 1))
    numeric = [all(re.fullmatch(r"[-\d.,e]*( ?dB| ?%)?", row[i]) for row in rows) for i in range(len(columns))]
    starts = [x + 12 + sum(widths[:i]) + COLUMN_GAP * i for i in range(len(columns))]

    def draw_cell(column: int, baseline: float, text: str, *, color: str, is_bold: bool = False) -> None:
        start = starts[column] + (widths[column] if numeric[column] else 0)
        canvas.text(start, baseline, text, color=color, anchor="end" if numeric[column] else "start", is_bold=is_bold)

    for column, name in enumerate(columns):
        draw_cell(column, y + 14, name, color=TEXT_COLOR, is_bold=True)
    y += 20
    canvas.line([(x, y), (x + 12 + sum(widths) + COLUMN_GAP * (len(columns) - 1), y)], color=FRAME_COLOR, width=1)
    y += 3
    for row, color in zip(rows, colors, strict=True):
        lines = wrap(row[-1], widths[-1]) or [""]
        height = LINE_HEIGHT * len(lines) + 3
        if color:
            canvas.box(x, y + 2, 4, height - 4, fill=color, stroke=color, radius=2)
        for column, text in enumerate(row[:-1]):
            draw_cell(column, y + 13, text, color=TEXT_COLOR)
        for number, line in enumerate(lines):
            draw_cell(len(row) - 1, y + 13 + number * LINE_HEIGHT, line, color=color or TEXT_COLOR)
        y += height
    return y


NAVIGATION_WIDTH = 120.0
"""Width of the list of sections in the report."""


def read_sections() -> list[str]:
    """Return the names of the sections of the report, from its HTML."""
    html = Path(page.__file__).with_name("assets") / "report.html"
    return re.findall(r'data-title="([^"]+)"', html.read_text(encoding="utf-8"))


def draw_report(facts: Mapping[str, Any]) -> bytes:
    """Return the layout of the HTML report, with the contents of a real one, without times."""
    report = facts["report"]
    canvas = Canvas(
        "module.clika_report(): one HTML file",
        "The sections of a report: overview, modules, layers, sensitivity, ranges and placement, with the contents of "
        f"a real report. {NOTE}.",
    )
    canvas.text(MAX_WIDTH - MARGIN, MARGIN + 12, NOTE, color=FAINT_COLOR, anchor="end")
    canvas.text(MARGIN, TOP + 14, report["model"], is_bold=True)
    for number, name in enumerate(read_sections(), 1):
        canvas.text(MARGIN, TOP + 14 + number * 22, name, color=ROLE_COLORS[Role.INTERFACE].title)
    x, width = MARGIN + NAVIGATION_WIDTH, MAX_WIDTH - 2 * MARGIN - NAVIGATION_WIDTH
    canvas.line([(x - 16, TOP), (x - 16, TOP + 22 * len(read_sections()) + 14)], color=FRAME_COLOR)
    y = _draw_tiles(canvas, x, TOP, width, report)
    y = _draw_modules(canvas, x, y, width, report)
    y = _draw_nodes(canvas, x, y, width, report)
    _draw_values(canvas, x, y, width, report)
    return canvas.render()


def _draw_heading(canvas: Canvas, x: float, y: float, title: str) -> float:
    """Draw the name of a section, which must exist, and return the y coordinate below it."""
    if title not in read_sections():
        raise ValueError(f"draw the section {title!r}: the report has {', '.join(read_sections())}. Draw one of these.")
    canvas.text(x, y + 16, title, size=13, is_bold=True)
    return y + 24


def _draw_tiles(canvas: Canvas, x: float, y: float, width: float, report: Mapping[str, Any]) -> float:
    """Draw the overview: a headline and large figures."""
    y = _draw_heading(canvas, x, y, "Overview")
    canvas.text(x, y + 10, report["summary"], color=FAINT_COLOR)
    root = report["modules"][0]
    layers = f"{root['quantized_layers']} of {root['layers']}"
    share = f"{root['quantized_macs'] / root['macs']:.1%}"
    tiles = {
        "layers in INT8": layers,
        "MACs in INT8": share,
        "weights and constants": f"{report['bytes_before'] / 1000:.1f} -> {report['bytes_after'] / 1000:.1f} KB",
        "predicted SQNR": f"{report['sqnr']:.1f} dB",
    }
    gap = 10.0
    tile = (width - gap * (len(tiles) - 1)) / len(tiles)
    for number, (name, figure) in enumerate(tiles.items()):
        left = x + number * (tile + gap)
        canvas.box(left, y + 20, tile, 50, fill=ROLE_COLORS[Role.FLOAT].background)
        canvas.text(left + 10, y + 42, figure, size=15, is_bold=True, max_width=tile - 20)
        canvas.text(left + 10, y + 60, name, color=FAINT_COLOR, max_width=tile - 20)
    return y + 84


def _draw_modules(canvas: Canvas, x: float, y: float, width: float, report: Mapping[str, Any]) -> float:
    """Draw the module hierarchy with sums, without the modules of a single node."""
    y = _draw_heading(canvas, x, y, "Modules")
    rows: list[list[str]] = []
    for module in report["modules"]:
        if module["count"] > 1 and module["layers"]:
            depth = module["scope"].count(".") + 1 if module["scope"] else 0
            name = "  " * depth + (module["scope"].rpartition(".")[2] or report["model"])
            sizes = [f"{module[key]:,}" for key in ("macs", "bytes_before", "bytes_after")]
            count = f"{module['quantized_layers']} of {module['layers']}"
            rows.append([name, count, *sizes, f"{module['sensitivity']:.1e}"])
    columns = ["module", "layers in INT8", "MACs", "bytes", "bytes after", "largest QS"]
    return draw_table(canvas, x, y, (columns, rows), colors=[""] * len(rows), max_width=width) + 10


def _draw_nodes(canvas: Canvas, x: float, y: float, width: float, report: Mapping[str, Any]) -> float:
    """Draw a row for each layer, with a bar for its sensitivity."""
    y = _draw_heading(canvas, x, y, "Layers")
    layers = [node for node in report["nodes"] if node["macs"]]
    rows = [
        [
            n["scope"],
            n["operator"],
            n["planned"],
            n["runs"],
            f"{n['bytes_before']:,}",
            f"{n['bytes_after']:,}",
            f"{n['sensitivity']:.1e}",
        ]
        for n in layers
    ]
    colors = [ROLE_COLORS[STATE_ROLES[node["state"]]].title for node in layers]
    columns = ["layer", "operator", "planned", "runs in", "bytes", "bytes after", "QS"]
    return draw_table(canvas, x, y, (columns, rows), colors=colors, max_width=width) + 10


def _draw_values(canvas: Canvas, x: float, y: float, width: float, report: Mapping[str, Any]) -> float:
    """Draw the observed range of the first activations, and their quantization."""
    y = _draw_heading(canvas, x, y, "Activations")
    rows = [
        [v["name"], f"{v['low']:.2f}", f"{v['high']:.2f}", f"{v['scale']:.1e}", v["observer"]]
        for v in report["values"][:4]
    ]
    columns = ["value", "min", "max", "scale", "observer"]
    colors = [ROLE_COLORS[Role.QUANTIZED].title] * len(rows)
    y = draw_table(canvas, x, y, (columns, rows), colors=colors, max_width=width)
    canvas.text(x + 12, y + 13, f"and {len(report['values']) - len(rows)} more", color=FAINT_COLOR)
    return y + 22
