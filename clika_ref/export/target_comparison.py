"""Compare targets: the results of quantizing one module for each, from the same calibration ranges."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from clika_ref.compiled.latency import measure_seconds_and_ratio
from clika_ref.compiled.lowering import check_supported, configure_for_plan, target_for
from clika_ref.compiled.runners import compile_temporarily
from clika_ref.compiled.state import CompiledModule, bind_graph
from clika_ref.compress.quantize import decide_for, require_ranges
from clika_ref.core.artifacts import Artifact
from clika_ref.core.errors import ClikaError, ModelError, TargetError
from clika_ref.core.ir import Graph
from clika_ref.core.targets import Target
from clika_ref.export.configuration import current_configuration
from clika_ref.export.explanation import Explanation, explain_artifact
from clika_ref.export.export_graph import make_export_graph, make_float_graph
from clika_ref.quantization.decision import Quantization, format_decibels
from clika_ref.reporting.tables import HasTables, Table
from clika_ref.settings.argument_checks import check_types
from clika_ref.settings.compile_options import BaseDeploymentSettings


@dataclass(frozen=True, slots=True)
class TargetFacts:
    """The results for one target."""

    target: str
    layers: int
    """Number of layers that are quantized, or have a low-bit weight."""
    total_layers: int
    """Number of layers in total."""
    bytes: int
    """Size of the file in bytes."""
    sqnr: float | None
    """Predicted SQNR in dB, of the part of the outputs that varies with the input; None if nothing is quantized."""
    share: float | None = None
    """Share of all MACs that the runtime runs quantized; None if the runtime is not installed."""
    seconds: float | None = None
    """Median seconds of a call on the first example; None if the runtime is not installed, or is emulated."""
    ratio: float | None = None
    """Ratio of those seconds to those of the float model in the same runtime, measured alternately."""
    is_emulated: bool = False
    """Whether another runtime emulates the target; its times are not comparable."""
    unavailable_reason: str = ""
    """Why the runtime could not be queried."""
    unsupported_reason: str = ""
    """Why the target does not support the module; all other facts are empty then."""


def _latency(row: TargetFacts) -> str:
    if row.is_emulated:
        return "not measured: emulated"
    return "" if row.seconds is None else f"{row.seconds * 1e3:.2f} ms"


def _unless_unsupported(tell: Callable[[TargetFacts], str], otherwise: str = "") -> Callable[[TargetFacts], str]:
    return lambda row: otherwise if row.unsupported_reason else tell(row)


COMPARISON_COLUMNS: Mapping[str, Callable[[TargetFacts], object]] = {
    "target": lambda row: row.target,
    "quantized layers": _unless_unsupported(
        lambda row: f"{row.layers} of {row.total_layers}", "unsupported: see below"
    ),
    "quantized MACs": lambda row: row.unavailable_reason if row.share is None else f"{row.share:.1%}",
    "file": _unless_unsupported(lambda row: f"{row.bytes / 1e6:.2f} MB"),
    "predicted SQNR": lambda row: "" if row.sqnr is None else format_decibels(row.sqnr),
    "latency": _latency,
    "ratio to float": lambda row: "" if row.ratio is None else f"{row.ratio:.2f}",
}


@dataclass(frozen=True, repr=False)
class TargetComparison(HasTables):
    """One row for each target; prints as a table."""

    rows: Sequence[TargetFacts]
    """The results for each target, in the order of the request."""

    @property
    def table(self) -> Table[TargetFacts]:
        """The rows."""
        return Table(self.rows, COMPARISON_COLUMNS)

    @property
    def unsupported_reasons(self) -> Sequence[str]:
        """The reasons of targets that do not support the module, one line each."""
        return [f"{row.target}: {row.unsupported_reason}" for row in self.rows if row.unsupported_reason]

    def parts(self) -> Sequence[Table[Any] | str]:
        """Return the table, and a line for each target that does not support the module."""
        return self.table, *self.unsupported_reasons


def make_unsupported_row(target: Target, error: ClikaError) -> TargetFacts:
    """Return the row of a target that does not support a module, with the reason."""
    return TargetFacts(target.describe_runtime(), 0, 0, 0, None, unsupported_reason=str(error))


def make_row(
    found: Quantization,
    target: Target,
    file: Artifact,
    explanation: Explanation | None,
    inputs: Sequence[torch.Tensor],
    *,
    in_float: Callable[[], Graph],
    unavailable_reason: str = "",
) -> TargetFacts:
    """Return the row of a target for a written file, with the times of its calls and of the float model's.

    Args:
        found: the decision for the target.
        target: the target.
        file: the artifact.
        explanation: the precision of each node in the runtime; None if it could not be queried.
        inputs: inputs of the graph, for timing.
        in_float: returns the graph as lowered for the target without quantization.
        unavailable_reason: why the runtime could not be queried.

    Raises:
        TargetError: the runtime rejects one of the files.
    """
    planned = sum(not layer.reason for layer in found.layers)
    sqnr = next((row.sqnr for row in found.what_if if row.layers == planned), None)
    common = (target.describe_runtime(), planned, len(found.layers), int(file.facts.get("bytes", 0)), sqnr)
    if explanation is None:
        return TargetFacts(*common, unavailable_reason=unavailable_reason)
    share = explanation.share()
    if target.emulated_by:
        return TargetFacts(*common, share=share, is_emulated=True)
    with compile_temporarily(in_float(), target) as other:
        seconds, ratio = measure_seconds_and_ratio(target.load(file), inputs, target.load(other), inputs)
    return TargetFacts(*common, share=share, seconds=seconds, ratio=ratio)


NO_DEPLOYMENTS = (
    "cannot compare targets: no deployment settings are given. Pass one for each target: clika_compare_targets("
    "DeploymentSettings_OpenVINO_ONNX(), DeploymentSettings_TensorRT_ONNX())"
)


def compare_targets(module: CompiledModule, deployments: Sequence[BaseDeploymentSettings]) -> TargetComparison:
    """Quantize a module for each target from its calibration ranges, and compare the results."""
    for deployment in deployments:
        check_types({"deployment_settings": deployment})
    if not deployments or None in deployments:
        raise ModelError(NO_DEPLOYMENTS)
    state, graph = module.clika_state, bind_graph(module)
    targets = [target_for(deployment, state.registry) for deployment in deployments]
    current_configuration().select_outputs(graph.outputs)  # an error for all targets, not for one row
    _, calibration = require_ranges(state, targets[0])
    rows: list[TargetFacts] = []
    for target in targets:
        try:
            rows.append(_measure_target(module, graph, target, calibration.reservoir.batches[0]))
        except (ModelError, TargetError) as error:
            rows.append(make_unsupported_row(target, error))
    return TargetComparison(rows)


def _measure_target(
    module: CompiledModule, graph: Graph, target: Target, inputs: Sequence[torch.Tensor]
) -> TargetFacts:
    """Quantize and export a graph for one target, and query its runtime about it if it is installed."""
    found, registry, form = decide_for(module, graph, target), module.clika_state.registry, current_configuration()
    target = configure_for_plan(target, found.plan)
    small = make_export_graph(graph, found.plan, target, registry, form)
    check_supported(small, target)
    # An emulated target decides by rules.
    unavailable_reason = "" if target.emulated_by else target.unavailable_reason() or ""
    in_float = partial(make_float_graph, graph, target, registry, form)
    with compile_temporarily(small, target) as file:
        explanation = None if unavailable_reason else explain_artifact(small, file, found.plan, target, inputs)
        return make_row(
            found, target, file, explanation, inputs, in_float=in_float, unavailable_reason=unavailable_reason
        )
