"""Targets side by side: what each would make of one module, from the same ranges."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from clika_ref.core.errors import ClikaError
from clika_ref.core.ir import Graph
from clika_ref.core.registry import Registry
from clika_ref.core.targets import Artifact, Target
from clika_ref.emulation import place_of, stand_in_of
from clika_ref.explanation import Explanation, compiled, explained
from clika_ref.exporting.configuration import ExportConfiguration
from clika_ref.exporting.export import as_written, refuse
from clika_ref.latency import seconds_and_ratio
from clika_ref.quantization.decision import Quantization, told_decibels
from clika_ref.reporting.tables import Table, Told


@dataclass(frozen=True, slots=True)
class TargetFacts:
    """What one target makes of a module."""

    target: str
    layers: int
    """How many layers are planned in integers, or hold their weight in few bits."""
    of_layers: int
    """How many there are."""
    bytes: int
    """Of the file."""
    sqnr: float | None
    """Predicted, in dB, of the part of the outputs that varies with the input; None where nothing is quantized."""
    share: float | None = None
    """Of the products of all layers, the share that the runtime runs in integers; None where it is not here to ask."""
    seconds: float | None = None
    """The median of a call on the first example; None where the runtime is not here, also where it is emulated."""
    ratio: float | None = None
    """Those seconds over those of the model in float in the same runtime, called in turn."""
    is_emulated: bool = False
    """Whether another runtime stands in for it, whose seconds are none of it."""
    missing: str = ""
    """Why the runtime could not be asked."""
    refusal: str = ""
    """Why the target makes nothing of the module; there are no other facts then."""


def _latency(row: TargetFacts) -> str:
    if row.is_emulated:
        return "not measured: emulated"
    return "" if row.seconds is None else f"{row.seconds * 1e3:.2f} ms"


def _unless_refused(tell: Callable[[TargetFacts], str], otherwise: str = "") -> Callable[[TargetFacts], str]:
    return lambda row: otherwise if row.refusal else tell(row)


COLUMNS: Mapping[str, Callable[[TargetFacts], object]] = {
    "target": lambda row: row.target,
    "layers in integers": _unless_refused(lambda row: f"{row.layers} of {row.of_layers}", "none: see below"),
    "products in integers": lambda row: row.missing if row.share is None else f"{row.share:.1%}",
    "file": _unless_refused(lambda row: f"{row.bytes / 1e6:.2f} MB"),
    "predicted SQNR": lambda row: "" if row.sqnr is None else told_decibels(row.sqnr),
    "latency": _latency,
    "of float": lambda row: "" if row.ratio is None else f"{row.ratio:.2f}",
}


@dataclass(frozen=True, repr=False)
class TargetComparison(Told):
    """One row for each target; printed, a table."""

    rows: Sequence[TargetFacts]
    """The facts of each target, in the order in which they were asked for."""

    @property
    def table(self) -> Table[TargetFacts]:
        """The rows."""
        return Table(self.rows, COLUMNS)

    @property
    def refusals(self) -> Sequence[str]:
        """Why some targets make nothing of the module, a line for each."""
        return [f"{row.target}: {row.refusal}" for row in self.rows if row.refusal]

    def parts(self) -> Sequence[Table[Any] | str]:
        """Return the table, and a line for each target that refuses."""
        return self.table, *self.refusals


def refused_by(target: Target, error: ClikaError) -> TargetFacts:
    """Return the row of a target that makes nothing of a module, which says why."""
    return TargetFacts(place_of(target), 0, 0, 0, None, refusal=str(error))


def facts_of(
    graph: Graph,
    found: Quantization,
    target: Target,
    registry: Registry,
    inputs: Sequence[torch.Tensor],
    *,
    form: ExportConfiguration,
) -> TargetFacts:
    """Write a graph as one target wants it, and ask its runtime, where that is here, what it makes of it.

    Args:
        graph: of the module.
        found: what was decided for the target.
        target: which.
        registry: the plugins.
        inputs: of the graph, with which calls are timed.
        form: in which it is written.

    Raises:
        ModelError: the form names an output that there is not, or wants four bits where there are none.
        TargetError: the target refuses a node.
    """
    small = as_written(graph, found.plan, target, registry, form)
    refuse(small, target)
    missing = None if stand_in_of(target) else target.missing()  # rules say of an emulated one what runs in integers
    with compiled(small, target) as file:
        asked = explained(small, file, found.plan, target, inputs) if missing is None else None

        def in_float() -> Graph:
            return as_written(graph, None, target, registry, replace(form, export_int4=None))

        return row_of(found, target, file, asked, inputs, in_float=in_float, missing=missing or "")


def row_of(
    found: Quantization,
    target: Target,
    file: Artifact,
    explanation: Explanation | None,
    inputs: Sequence[torch.Tensor],
    *,
    in_float: Callable[[], Graph],
    missing: str = "",
) -> TargetFacts:
    """Return the row of a target whose file is there, with the time of its calls and of those of the model in float.

    Args:
        found: what was decided for the target.
        target: which.
        file: what it made of the module.
        explanation: what its runtime makes of that; None where it could not be asked.
        inputs: of the graph, with which calls are timed.
        in_float: returns the graph as the target gets it where nothing is quantized.
        missing: why the runtime could not be asked.

    Raises:
        TargetError: the runtime rejects one of the files.
    """
    planned = sum(not layer.reason for layer in found.layers)
    sqnr = next((row.sqnr for row in found.what_if if row.layers == planned), None)
    told = (place_of(target), planned, len(found.layers), int(file.facts.get("bytes", 0)), sqnr)
    if explanation is None:
        return TargetFacts(*told, missing=missing)
    share = explanation.share()
    if stand_in_of(target):
        return TargetFacts(*told, share=share, is_emulated=True)
    with compiled(in_float(), target) as other:
        seconds, ratio = seconds_and_ratio(target.load(file), inputs, target.load(other), inputs)
    return TargetFacts(*told, share=share, seconds=seconds, ratio=ratio)
