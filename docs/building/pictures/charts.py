"""Charts: a histogram with ranges, sensitivities of layers, pruning groups, and the conformance matrix."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from clika_ref_visualize.pictures.drawing import Role
from clika_ref_visualize.pictures.style import FAINT_COLOR, FRAME_COLOR, ROLE_COLORS, TEXT_COLOR, measure_text

from docs.building.pictures.canvas import MARGIN, MAX_WIDTH, TOP, Canvas

FLOAT, INT8, KEPT, GROUP_B, MISSED, TEAL, BLUE = (
    ROLE_COLORS[role]
    for role in (
        Role.FLOAT,
        Role.QUANTIZED,
        Role.KEPT_IN_FLOAT,
        Role.WEIGHT_ONLY,
        Role.NOT_QUANTIZED,
        Role.ADAPTER,
        Role.INTERFACE,
    )
)
"""Colors of the product's pictures, by their meaning here."""

BINS = 72
"""Bars of the histogram."""


def draw_histogram(facts: Mapping[str, Any]) -> bytes:
    """Return the histogram of an activation, with the ranges of three observers and the chosen one."""
    errors, ranges = facts["errors"], facts["ranges"]
    chosen = min(errors, key=errors.__getitem__)
    canvas = Canvas(
        "Histogram of an activation, and its quantized range",
        f"Counts of {sum(facts['counts']):,} elements on a logarithmic axis. "
        f"The range with the least error is {chosen}.",
    )
    low, high = (end * 1.02 for end in ranges["min/max"])
    left, right, top, bottom = MARGIN + 50, MAX_WIDTH - MARGIN, TOP + 76, TOP + 296

    def x_of(value: float) -> float:
        return left + (right - left) * (value - low) / (high - low)

    counts = [0] * BINS
    for center, count in zip(facts["centers"], facts["counts"], strict=True):
        counts[min(BINS - 1, int(BINS * (center - low) / (high - low)))] += count
    tallest = math.log10(max(counts)) + 0.2
    start, end = map(x_of, ranges[chosen])
    canvas.box(start, top, end - start, bottom - top, fill=INT8.background, stroke=INT8.background, radius=0)
    for decade in range(int(tallest) + 1):
        y = bottom - (bottom - top) * (decade + 0.2) / (tallest + 0.2)
        canvas.line([(left, y), (right, y)], color="#e3e7ec", width=1)
        canvas.text(left - 8, y + 4, f"{10**decade:,}", color=FAINT_COLOR, anchor="end")
    bar = (right - left) / BINS
    for number, count in enumerate(counts):
        if count:
            height = (bottom - top) * (math.log10(count) + 0.2) / (tallest + 0.2)
            middle = low + (high - low) * (number + 0.5) / BINS
            color = INT8.title if ranges[chosen][0] <= middle <= ranges[chosen][1] else KEPT.title
            canvas.box(left + number * bar + 0.5, bottom - height, bar - 1, height, fill=color, stroke=color, radius=0)
    canvas.line([(left, bottom), (right, bottom)], color=TEXT_COLOR, width=1)
    for value in range(2 * math.ceil(low / 2), math.floor(high) + 1, 2):
        canvas.text(x_of(value), bottom + 16, str(value), color=FAINT_COLOR, anchor="middle")
    canvas.text(left, bottom + 38, "Elements of 8 batches; the counts are logarithmic.", color=FAINT_COLOR)
    x = canvas.swatch(left, bottom + 60, INT8.title, "within the chosen range")
    canvas.swatch(x, bottom + 60, KEPT.title, "clipped to its end")
    for number, name in enumerate(ranges):
        ends = [x_of(value) for value in ranges[name]]
        y = TOP + 12 + number * 22
        text = _describe_range(ranges[name], errors[name])
        color, prefix, dash = (INT8.title, "chosen: ", "") if name == chosen else (FLOAT.title, "", "3 3")
        for end in ends:
            canvas.line([(end, y), (end, bottom)], color=color, width=1, dash=dash)
        canvas.line([(ends[0], y), (ends[1], y)], color=color)
        _draw_label(canvas, (left + right) / 2, y, f" {prefix}{name}, {text} ", color)
    return canvas.render()


def _describe_range(ends: Sequence[float], error: float) -> str:
    scale = (ends[1] - ends[0]) / 255
    return f"{ends[0]:.2f} to {ends[1]:.2f}, scale {scale:.3f}, mean squared error {error:.1e}"


def _draw_label(canvas: Canvas, x: float, y: float, text: str, color: str) -> None:
    """Draw a text in the middle of a line."""
    width = measure_text(text)
    canvas.box(x - width / 2, y - 8, width, 16, fill="#ffffff", stroke="#ffffff")
    canvas.text(x, y + 4, text, color=color, anchor="middle")


def draw_sensitivities(facts: Mapping[str, Any]) -> bytes:
    """Return a bar for the sensitivity of each layer, with the threshold that decides."""
    report = facts["report"]
    layers = [node for node in report["nodes"] if node["sensitivity"] is not None]
    canvas = Canvas(
        "Sensitivity (QS) of each layer",
        "The relative squared error of the outputs if only this layer is quantized, on a logarithmic axis. "
        "Layers above the threshold stay in float.",
    )
    smallest = min(math.log10(node["sensitivity"]) for node in layers) - 0.15
    largest = max(math.log10(node["sensitivity"]) for node in layers) + 0.25
    left, right = MARGIN + 150, MAX_WIDTH - MARGIN - 60

    def x_of(value: float) -> float:
        return left + (right - left) * (math.log10(value) - smallest) / (largest - smallest)

    y = TOP + 22
    for node in layers:
        colors = KEPT if node["state"] == "kept_in_float" else INT8
        canvas.text(left - 10, y + 15, node["scope"], anchor="end")
        end = x_of(node["sensitivity"])
        canvas.box(left, y, end - left, 22, fill=colors.title, stroke=colors.title, radius=2)
        canvas.text(right + 60, y + 15, f"{node['sensitivity']:.1e}", color=colors.title, anchor="end")
        y += 30
    threshold = x_of(report["threshold"])
    canvas.line([(threshold, TOP + 14), (threshold, y)], color=MISSED.title, dash="5 4")
    text = f"quantization_sensitivity_threshold={report['threshold']:g}"
    canvas.text(threshold, TOP + 8, text, color=MISSED.title, anchor="middle")
    x = canvas.swatch(left, y + 20, INT8.title, "quantized")
    x = canvas.swatch(x, y + 20, KEPT.title, "kept in float: above the threshold")
    canvas.text(x, y + 20, "logarithmic axis", color=FAINT_COLOR)
    return canvas.render()


CELL = 13.0
"""Size of a cell of a weight, one for each pair of an output and an input channel."""

GROUP_COLORS = (BLUE, GROUP_B)


def draw_pruning_groups(facts: Mapping[str, Any]) -> bytes:
    """Return the weights of a network as grids, with the groups of their channels and the indices removed together."""
    canvas = Canvas(
        "Channels that are removed together",
        "The weights of four layers. Output channels are rows, input channels are columns. The addition couples the "
        "output channels of stem and reduce with the input channels of expand and head.",
    )
    x, top = MARGIN + 24, TOP + 62
    for layer in facts["layers"]:
        rows, columns = layer["shape"]
        canvas.text(x, TOP + 14, layer["name"], size=12, is_bold=True)
        canvas.text(x, TOP + 30, f"{layer['operator']} [{rows}, {columns}]", color=FAINT_COLOR)
        _draw_weight(canvas, x, top, layer)
        x += max(columns * CELL, 110) + 80
    y = top + 12 * CELL + 44
    canvas.text(MARGIN, y - 16, "rows: output channels; columns: input channels", color=FAINT_COLOR)
    for number, (group, colors) in enumerate(zip(facts["groups"], GROUP_COLORS, strict=True)):
        text = (
            f"group {number + 1}: {group['count']} {group['kind']}, produced by {' and '.join(group['producers'])}, "
            f"read by {' and '.join(group['consumers'])}"
        )
        canvas.swatch(MARGIN, y + 8, colors.title, text)
        y += 22
    x = canvas.swatch(MARGIN, y + 8, MISSED.title, "one channel of each group, removed from every weight")
    canvas.swatch(x, y + 8, FRAME_COLOR, "fixed: inputs and outputs of the model")
    return canvas.render()


def _draw_weight(canvas: Canvas, x: float, y: float, layer: Mapping[str, Any]) -> None:
    """Draw a weight as a grid, with a bar for the group of each of its two dims."""
    rows, columns = layer["shape"]
    gone_rows, gone_columns = layer["removed"]
    owners = [FRAME_COLOR if owner is None else GROUP_COLORS[owner].title for owner in layer["groups"]]
    canvas.box(x - 12, y, 7, rows * CELL, fill=owners[0], stroke=owners[0], radius=2)
    canvas.box(x, y - 12, columns * CELL, 7, fill=owners[1], stroke=owners[1], radius=2)
    for row in range(rows):
        for column in range(columns):
            is_gone = row in gone_rows or column in gone_columns
            fill, stroke = (MISSED.background, MISSED.title) if is_gone else (FLOAT.background, FRAME_COLOR)
            canvas.box(
                x + column * CELL + 1, y + row * CELL + 1, CELL - 2, CELL - 2, fill=fill, stroke=stroke, radius=1
            )


VERDICTS: Mapping[str, tuple[str, str]] = {
    "pass": (INT8.title, "pass"),
    "deviation:declared": (TEAL.title, "declared deviation"),
    "unsupported": (KEPT.title, "rejected, with a reason"),
    "not-run": (FLOAT.title, "not run"),
}
"""Colors and meanings of the verdicts of a task; all others are failures."""

MATRIX_COLUMNS = ("contract", "operators float32", "operators int64", "pairs", "dynamic", "artifacts")


def draw_conformance(facts: Mapping[str, Any]) -> bytes:
    """Return the matrix of operators and tasks of a run of the conformance suite, with the number of checks."""
    found: Mapping[str, Mapping[str, Sequence[Any]]] = facts["conformance"]
    canvas = Canvas(
        "Conformance of ONNX Runtime, profile quick, seed 0",
        f"The verdict of {len(found)} operators at each level, with the number of checks. Empty cells are "
        "not part of the profile.",
    )
    left, width = MARGIN + 200, (MAX_WIDTH - 2 * MARGIN - 200) / len(MATRIX_COLUMNS)
    for number, name in enumerate(MATRIX_COLUMNS):
        for line, word in enumerate(name.split()):
            canvas.text(left + (number + 0.5) * width, TOP + 12 + 14 * line, word, anchor="middle", is_bold=True)
    y, used = TOP + 36, set[str]()
    for operator, tasks in found.items():
        canvas.text(left - 10, y + 17, operator, anchor="end")
        for number, name in enumerate(MATRIX_COLUMNS):
            x = left + number * width + 2
            if name not in tasks:
                canvas.box(x, y, width - 4, 26, fill="#ffffff", stroke="#e3e7ec", radius=3)
                continue
            verdict, count = tasks[name]
            used.add(verdict)
            color, _ = VERDICTS.get(verdict, (MISSED.title, "failure"))
            canvas.box(x, y, width - 4, 26, fill=color, stroke=color, radius=3)
            canvas.text(x + width / 2 - 2, y + 17, str(count), color="#ffffff", anchor="middle")
        y += 30
    x = left
    for verdict in sorted(used):
        color, meaning = VERDICTS.get(verdict, (MISSED.title, "failure"))
        x = canvas.swatch(x, y + 18, color, meaning)
    canvas.text(MARGIN, y + 18, "number of checks:", color=FAINT_COLOR)
    return canvas.render()
