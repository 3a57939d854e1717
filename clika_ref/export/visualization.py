"""The facts about a module that a visualizer draws and reports, and the installed visualizer."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from clika_ref.core.errors import PluginError, format_install_command
from clika_ref.core.ir import Graph
from clika_ref.core.registry import PLUGINS_VARIABLE, Registry
from clika_ref.core.targets import Target
from clika_ref.core.visualizers import Visualizer
from clika_ref.export.configuration import ExportConfiguration
from clika_ref.export.explanation import Explanation
from clika_ref.export.target_comparison import TargetFacts
from clika_ref.quantization.calibration.range_table import RangeTable
from clika_ref.quantization.decision import Quantization
from clika_ref.quantization.qdq.insertion import Plan
from clika_ref.settings.settings import Settings

VISUALIZER_DISTRIBUTION = "clika-ref-visualize"
"""Our distribution with a visualizer."""


@dataclass(frozen=True)
class PictureFacts:
    """A graph to draw, and the precision of its nodes."""

    graph: Graph
    plan: Plan | None = None
    """The plan that the graph was quantized with; None for a float graph."""
    explanation: Explanation | None = None
    """The precision of each node in the runtime, shown instead of the planned one; None if unknown."""
    subtitle: str = ""
    """Text to show after the number of nodes."""


@dataclass(frozen=True)
class ReportFacts:
    """The facts about a module for a report."""

    graph: Graph
    """The stored graph, bound to its weights."""
    target: Target
    """The target of the module."""
    registry: Registry
    """The plugins."""
    form: ExportConfiguration
    """The form of the export."""
    example: Sequence[torch.Tensor]
    """Inputs of the graph, for counting MACs and measuring times."""
    settings: Settings
    """All settings of the module."""
    plan: Plan | None = None
    """The quantization plan with current scales; None for a float module."""
    found: Quantization | None = None
    """The quantization decision; None if unknown."""
    table: RangeTable | None = None
    """Observed ranges; None if unknown."""
    warnings: Sequence[str] = ()
    """Warnings given during compilation."""
    seconds: Mapping[str, float] = field(default_factory=dict[str, float])
    """Seconds of each stage."""
    others: Sequence[TargetFacts] = ()
    """The results for further targets, to compare with."""


def require_visualizer(registry: Registry, attempted: str) -> Visualizer:
    """Return the visualizer of the first plugin that has one.

    Args:
        registry: the plugins.
        attempted: the attempted call, for the message.

    Raises:
        PluginError: no plugin has a visualizer; the message names the package to install.
    """
    found = next(iter(registry.visualizers.values()), None)
    if found is None:
        names = ", ".join(plugin.name for plugin in registry.plugins) or "none"
        command = format_install_command(VISUALIZER_DISTRIBUTION)
        msg = f"{attempted}: no loaded plugin draws pictures and writes reports (loaded: {names}). Run {command}."
        if PLUGINS_VARIABLE in os.environ:
            msg += f" ${PLUGINS_VARIABLE} limits which plugins are loaded."
        raise PluginError(msg)
    return found
