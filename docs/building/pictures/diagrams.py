"""Diagrams: the pipeline, the packages, dynamic dims and a guard."""

from __future__ import annotations

import ast
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from clika_ref_visualize.pictures.drawing import Role
from clika_ref_visualize.pictures.style import FAINT_COLOR, ROLE_COLORS, RoleColors, measure_text

from docs.building.pictures.canvas import LINE_HEIGHT, MARGIN, MAX_WIDTH, TOP, Canvas, wrap

ROOT = Path(__file__).parents[3]

ALWAYS, ON_REQUEST, PRODUCT = (ROLE_COLORS[role] for role in (Role.FLOAT, Role.WEIGHT_ONLY, Role.INTERFACE))
"""Colors of stages that always run, of those on request, and of models, modules and files."""

COMPILE_STAGES: Sequence[tuple[str, RoleColors, str, str]] = (
    ("capture", ALWAYS, "trace, and compare with eager PyTorch", "clika_ref/capture/capture.py"),
    ("clean", ALWAYS, "CLEAN passes, until nothing changes", "clika_ref/core/registry.py"),
    ("prune", ON_REQUEST, "remove channels, or mask weights", "clika_ref/pruning/stages.py"),
    ("adapters", ON_REQUEST, "attach low-rank matrices to layers", "clika_ref/lora/attaching.py"),
    ("calibrate", ON_REQUEST, "run a lowered clone on data: Plan", "clika_ref/compress/graph_quantization.py"),
    ("wrap", ALWAYS, "Graph + Plan -> ClikaModule", "clika_ref/pipeline.py"),
)
"""Stages of ``clika_compile``: the name, the color, the effect, and the file."""

EXPORT_STAGES: Sequence[tuple[str, RoleColors, str, str]] = (
    ("lower", ALWAYS, "clone; CLEAN and FUSE passes", "clika_ref/compiled/lowering.py"),
    ("quantize", ON_REQUEST, "insert Q/DQ nodes from the Plan", "clika_ref/quantization/qdq/insertion.py"),
    ("write", ALWAYS, "the target writes a temporary file", "clika_ref/core/targets.py"),
    ("compare", ALWAYS, "run it, compare it with the module", "clika_ref/export/quantized_check.py"),
    ("move", ALWAYS, "move the file into place", "clika_ref/export/export.py"),
)
"""Stages of ``clika_export``, for each target."""

STAGE_HEIGHT, STAGE_GAP, NAME_WIDTH = 40.0, 16.0, 96.0


def draw_pipeline() -> bytes:
    """Return the diagram of both halves of the pipeline: from a model to a module, and from a module to a file."""
    canvas = Canvas(
        "From a model to a file",
        "clika_compile runs capture, clean, prune, adapters, calibrate and wrap, and returns a ClikaModule. "
        "clika_export runs lower, quantize, write, compare and move, and returns an artifact.",
    )
    half = (MAX_WIDTH - 2 * MARGIN - 40) / 2
    right = MAX_WIDTH - MARGIN - half
    left_bottom = _draw_column(canvas, MARGIN, half, "model, tracing inputs, calibration data", COMPILE_STAGES)
    right_bottom = _draw_column(canvas, right, half, "ClikaModule, for each target", EXPORT_STAGES)
    _draw_product(canvas, MARGIN, left_bottom, half, "ClikaModule")
    canvas.text(MARGIN, left_bottom + 46, "eval(): the quantized graph of the artifact", color=FAINT_COLOR)
    canvas.text(MARGIN, left_bottom + 61, "train(): fake quantization, with gradients", color=FAINT_COLOR)
    _draw_product(canvas, right, right_bottom, half, "artifact: ONNX Runtime, OpenVINO, TensorRT")
    middle = MARGIN + half + 20
    way = [(MARGIN + half, left_bottom + 15), (middle, left_bottom + 15), (middle, TOP + 15), (right, TOP + 15)]
    canvas.arrow(way, color=PRODUCT.title)
    x = right
    for color, text in ((ALWAYS, "always"), (ON_REQUEST, "on request")):
        x = canvas.swatch(x, left_bottom + 61, color.title, text)
    return canvas.render()


def _draw_column(
    canvas: Canvas, x: float, width: float, start: str, stages: Sequence[tuple[str, RoleColors, str, str]]
) -> float:
    """Draw stages below each other, and return the y coordinate of the box after them."""
    y = TOP
    _draw_product(canvas, x, y, width, start)
    y += 30
    for name, colors, effect, file in stages:
        if not (ROOT / file).is_file():
            raise ValueError(f"draw the stage {name!r}: {file} does not exist. Name the file of the stage.")
        canvas.arrow([(x + NAME_WIDTH / 2, y), (x + NAME_WIDTH / 2, y + STAGE_GAP)])
        y += STAGE_GAP
        canvas.box(x, y, width, STAGE_HEIGHT, fill=colors.background, stroke=colors.title)
        canvas.box(x, y, NAME_WIDTH, STAGE_HEIGHT, fill=colors.title, stroke=colors.title)
        middle = x + NAME_WIDTH / 2
        canvas.text(middle, y + 24, name, size=12, color="#ffffff", anchor="middle", is_bold=True, max_width=NAME_WIDTH)
        room = width - NAME_WIDTH - 16
        canvas.text(x + NAME_WIDTH + 8, y + 17, effect, max_width=room)
        canvas.text(x + NAME_WIDTH + 8, y + 32, file, size=10, color=FAINT_COLOR, max_width=room)
        y += STAGE_HEIGHT
    canvas.arrow([(x + NAME_WIDTH / 2, y), (x + NAME_WIDTH / 2, y + STAGE_GAP)])
    return y + STAGE_GAP


def _draw_product(canvas: Canvas, x: float, y: float, width: float, text: str) -> None:
    canvas.box(x, y, width, 30, fill=PRODUCT.background, stroke=PRODUCT.title)
    canvas.text(x + width / 2, y + 19, text, size=12, anchor="middle", is_bold=True, max_width=width)


def draw_packages() -> bytes:
    """Return the diagram of the packages, in the layers that import-linter checks."""
    canvas = Canvas(
        "Packages: each imports only from lower layers",
        "The layers of clika_ref, from the import contract in pyproject.toml, each package with the first line of its "
        "docstring; below them the plugins, found by entry points.",
    )
    y = TOP
    for layer in read_layers():
        y = _draw_layer(canvas, y, [(name, _read_summary(name)) for name in layer], ROLE_COLORS[Role.FLOAT])
    middle = MAX_WIDTH / 2
    canvas.arrow([(middle, y + 28), (middle, y - 2)])
    canvas.text(middle + 14, y + 17, "hooks, found by entry points; clika_ref imports no plugin", color=FAINT_COLOR)
    y += 34
    plugins = [(path.parent.name, _describe(path)) for path in sorted((ROOT / "plugins").glob("*/pyproject.toml"))]
    plugins.append(("conformance", _describe(ROOT / "conformance/pyproject.toml")))
    for start in range(0, len(plugins), 3):
        y = _draw_layer(canvas, y, plugins[start : start + 3], ROLE_COLORS[Role.QUANTIZED])
    return canvas.render()


def read_layers() -> list[list[str]]:
    """Return the packages of each layer of clika_ref, the highest first, from the import contract."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    (contract,) = (
        c
        for c in settings["tool"]["importlinter"]["contracts"]
        if c["type"] == "layers" and c["containers"] == ["clika_ref"]
    )
    return [[name.strip("() ") for name in layer.split("|")] for layer in contract["layers"]]


def _read_summary(name: str) -> str:
    """Return the first line of the docstring of a package or a module of clika_ref."""
    place = ROOT / "clika_ref" / name
    file = place / "__init__.py" if place.is_dir() else place.with_suffix(".py")
    return (ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or "").partition("\n")[0].replace("`", "")


def _describe(project: Path) -> str:
    return tomllib.loads(project.read_text(encoding="utf-8"))["project"]["description"]


def _draw_layer(canvas: Canvas, y: float, packages: Sequence[tuple[str, str]], colors: RoleColors) -> float:
    """Draw the packages of a layer next to each other, and return the y coordinate of the next layer."""
    gap = 10.0
    width = (MAX_WIDTH - 2 * MARGIN - gap * (len(packages) - 1)) / len(packages)
    name_width = max(measure_text(name, 12) for name, _ in packages) + 20
    is_next_to_name = width - name_width > 400  # else the summary is below the name
    texts = [wrap(summary, (width - name_width if is_next_to_name else width) - 20) for _, summary in packages]
    lines = max(map(len, texts))
    height = max(lines, 1) * LINE_HEIGHT + (13 if is_next_to_name else 30)
    for number, ((name, _), summary) in enumerate(zip(packages, texts, strict=True)):
        x = MARGIN + number * (width + gap)
        canvas.box(x, y, width, height, fill=colors.background, stroke=colors.title)
        canvas.text(x + 10, y + 18, name, size=12, color=colors.title, is_bold=True)
        indent, baseline = (name_width, y + 18) if is_next_to_name else (10.0, y + 34)
        for line in summary:
            canvas.text(x + indent, baseline, line, color=FAINT_COLOR, max_width=x + width - (x + indent))
            baseline += LINE_HEIGHT
    return y + height + 8


def draw_dynamic_dims(facts: Mapping[str, Any]) -> bytes:
    """Return the diagram of tracing inputs, their symbols, a guard, and calls that it allows and rejects.

    Args:
        facts: of `docs.building.pictures.facts.find_dynamic_facts`.
    """
    canvas = Canvas(
        "Dynamic dims and a guard",
        "Two tracing inputs differ in two dims, which become symbols. A branch of the model becomes a guard. "
        "The module accepts shapes that satisfy it, and rejects others with an error.",
    )
    y = TOP + 6
    for number, shape in enumerate(facts["tracing"], 1):
        canvas.text(MARGIN, y + 19, f"tracing input {number}", color=FAINT_COLOR)
        _draw_shape(canvas, y, shape, facts["dynamic"])
        y += 38
    canvas.arrow([(430, y - 4), (430, y + 22)])
    canvas.text(446, y + 12, "dims that differ become symbols", color=FAINT_COLOR)
    y += 28
    canvas.text(MARGIN, y + 19, "type in the graph", color=FAINT_COLOR)
    _draw_shape(canvas, y, facts["type"], facts["dynamic"])
    y += 56
    canvas.text(MARGIN, y, "branch of the model", color=FAINT_COLOR)
    canvas.text(180, y, facts["branch"])
    canvas.text(MARGIN, y + 22, "guard", color=FAINT_COLOR)
    canvas.text(180, y + 22, facts["guard"], color=ROLE_COLORS[Role.KEPT_IN_FLOAT].title, is_bold=True)
    y += 44
    for shape, result in facts["calls"]:
        colors = ROLE_COLORS[Role.QUANTIZED if result.startswith("accepted:") else Role.NOT_QUANTIZED]
        lines = wrap(result, MAX_WIDTH - MARGIN - 250)
        height = max(len(lines) * LINE_HEIGHT + 13, 28)
        canvas.box(MARGIN, y, MAX_WIDTH - 2 * MARGIN, height, fill=colors.background, stroke=colors.title)
        canvas.text(MARGIN + 10, y + 18, f"call with {shape}", color=colors.title, is_bold=True, max_width=210)
        canvas.paragraph(240, y + 18, " ".join(lines), MAX_WIDTH - MARGIN - 250)
        y += height + 8
    return canvas.render()


def _draw_shape(canvas: Canvas, y: float, shape: Sequence[object], dynamic: Sequence[int]) -> None:
    """Draw the dims of a shape as boxes, with dynamic ones in color."""
    for axis, length in enumerate(shape):
        role = Role.WEIGHT_ONLY if axis in dynamic else Role.FLOAT
        colors = ROLE_COLORS[role]
        canvas.box(180 + axis * 130, y, 120, 28, fill=colors.background, stroke=colors.title)
        canvas.text(240 + axis * 130, y + 18, str(length), size=12, anchor="middle", max_width=116)
