"""Pictures of a `ClikaModule`: drawings in files, and the display in notebooks."""

from __future__ import annotations

import os
from html import escape
from pathlib import Path

import torch

from clika_ref.capture.surrounding_autocast import outside_autocast
from clika_ref.core.errors import ModelError
from clika_ref.core.ir import Graph
from clika_ref.core.registry import load_registry
from clika_ref.export.explanation import Explanation
from clika_ref.export.simulation import quantize_for_target, target_of
from clika_ref.module.adapted_module import AdaptedModule
from clika_ref.pictures.graph_drawing import build_drawing
from clika_ref.pictures.svg import write_svg
from clika_ref.pictures.writing import draw, picture_path
from clika_ref.quantization.qdq.insertion import Plan
from clika_ref.reporting.log import CompilationLog

MAX_NOTEBOOK_NODES = 300
"""Maximum number of nodes for a picture in a notebook; larger models are drawn to a file."""

SCROLL_STYLE = "max-height: 480px; overflow: auto; border: 1px solid #d5dbe2"


class PicturedModule(AdaptedModule):
    """A module around a graph that can be drawn."""

    def clika_visualize(self, path: str | os.PathLike[str], explanation: Explanation | None = None) -> Path:
        """Draw the module to a file, and return its path.

        Each node is a box with its name, type, shapes and attributes, in frames for the modules of the original. A
        quantized module is drawn as lowered for its target, with its batch norms folded. Colours mark quantized nodes,
        quantized tensors and layers kept in float; tooltips give the reason.

        Args:
            path: ``.svg``, ``.html`` (folds modules, pans, zooms, searches), ``.png`` or ``.dot``; ``.svg`` is added to
                a path without a suffix. An existing file is overwritten.
            explanation: the result of `clika_explain`, to show the precision of each node in the runtime.

        Raises:
            ModelError: the suffix is another one, the file cannot be written, the module is empty, or the renderer for
                ``.png`` is not installed: ``pip install 'clika-ref[pictures]'``.
            TargetError: no plugin provides the target that the module is quantized for.
        """
        if not isinstance(explanation, Explanation | None):
            msg = f"explanation is {explanation!r}, a {type(explanation).__name__}; give what clika_explain() returns"
            raise ModelError(msg)
        place = picture_path(path)
        with CompilationLog.open(self._clika_logs_dir) as log, log.stage("Drawing") as stage:
            graph, plan, subtitle = self._graph_to_draw()
            if place.exists():
                log.detail(f"Visualization: file exists: {place}, Overwriting")
            draw(graph, place, plan=plan, explanation=explanation, subtitle=subtitle)
            stage.done(place.name)
            log.detail(f"Saved graph visualization to: {place}")
        return place

    def _graph_to_draw(self) -> tuple[Graph, Plan | None, str]:
        """Return the graph, lowered and quantized if the module is quantized, with its plan and a subtitle."""
        own = self._learned_quantization
        if own is None:
            return self.graph, None, ""
        registry = self._clika_registry or load_registry()
        target = target_of(own, registry)
        with torch.no_grad(), outside_autocast():
            return (
                quantize_for_target(self.graph, own.plan, target, registry),
                own.plan,
                f"as for {target.describe_runtime()}",
            )

    def _repr_html_(self) -> str:
        """Return HTML for notebooks: a one-line summary, the picture, and the tables of decisions."""
        if "_clika_graph" not in self.__dict__:
            return f"<p>{escape(repr(self))}</p>"
        graph, plan, subtitle = self._graph_to_draw()
        held = (value.data for value in self.graph.constants.values())  # without learned scales
        parameters = sum(data.numel() for data in held if isinstance(data, torch.nn.Parameter))
        told = ", ".join(part for part in (f"{len(graph):,} nodes", f"{parameters:,} parameters", subtitle) if part)
        parts = [f"<p><b>{escape(graph.name)}</b>: {escape(told)}</p>"]
        if len(graph) <= MAX_NOTEBOOK_NODES:
            parts.append(f'<div style="{SCROLL_STYLE}">{write_svg(build_drawing(graph, plan)).decode()}</div>')
        else:
            parts.append("<p>clika_visualize(&quot;model.html&quot;) draws it</p>")
        found = self._clika_quantized and self._clika_quantized.found
        if found is not None:
            parts.append(f"<details><summary>What was decided</summary>{found._repr_html_()}</details>")
        return "".join(parts)
