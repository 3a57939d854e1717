"""Build the contents of a report from the plan, the observed ranges, the runtime and measured times."""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch

from clika_ref.compiled.lowering import check_supported
from clika_ref.compiled.runners import compile_temporarily, to_cpu
from clika_ref.core.artifacts import Artifact
from clika_ref.core.errors import ModelError, TargetError
from clika_ref.core.ir import Graph, Value
from clika_ref.core.targets import FLOAT_PRECISION, Target
from clika_ref.core.types import TensorType
from clika_ref.export.explanation import Explanation, explain_artifact
from clika_ref.export.export_graph import make_export_graph, make_float_graph
from clika_ref.export.target_comparison import TargetFacts, make_row, make_unsupported_row
from clika_ref.export.visualization import ReportFacts
from clika_ref.quantization.decision import Quantization
from clika_ref.quantization.report import NO_DECISIONS_MESSAGE
from clika_ref.settings.settings import Settings
from clika_ref_visualize.report.contents import ChosenRow, LatencyRecord, NodeRecord, ReportContents
from clika_ref_visualize.report.module_tree import build_module_records
from clika_ref_visualize.report.node_records import build_node_records, count_constant_bytes
from clika_ref_visualize.report.reproduction import collect_reproduction, find_irreproducible_steps
from clika_ref_visualize.report.value_records import build_value_records

FLOAT_MODULE_MESSAGE = "The module is float. Quantize it with clika_initialize_algorithms(calibration_inputs=...)."

NO_RANGES_MESSAGE = (
    "Observed ranges are unknown: the module is a copy, or was loaded without calibration inputs. Calibrate it again "
    "with clika_initialize_algorithms(calibration_inputs=...)."
)

DECISION_PARTS = ("sensitivity", "what_if", "targets")
"""Parts that are empty if the quantization decision is unknown."""

MAX_NAMED_NODES = 3
"""Maximum number of nodes that a warning names."""


@dataclass(frozen=True)
class _RuntimeResults:
    """Results from the target's runtime."""

    explanation: Explanation | None = None
    bytes_of_file: int | None = None
    seconds: Mapping[str, float] = field(default_factory=dict[str, float])
    unavailable: Mapping[str, str] = field(default_factory=dict[str, str])
    """Reasons for missing results, by part."""
    row: TargetFacts | None = None
    """Row of the target in the comparison; None if the quantization decision is unknown."""


def build_contents(subject: ReportFacts, step: Callable[[str], None]) -> ReportContents:
    """Return the contents of a report on a module.

    Args:
        subject: the facts about the module.
        step: callback that receives the name of each step.

    Raises:
        ModelError: the requested form of export is unsupported.
    """
    graph, plan, quantization = subject.graph, subject.plan, subject.found
    step("writing an artifact")
    written = make_export_graph(graph, plan, subject.target, subject.registry, subject.form)
    results = _query_runtime(subject, written, step)
    values = build_value_records(written, plan, subject.table, quantization.observers if quantization else {})
    indices = {value: index for index, value in enumerate(values)}
    nodes = build_node_records(
        written,
        indices,
        scheme=subject.target.scheme,
        plan=plan,
        quantization=quantization,
        explanation=results.explanation,
        seconds=results.seconds,
    )
    before, after = count_constant_bytes(written)
    own = [] if results.row is None else [results.row]
    return ReportContents(
        model=graph.name,
        target=subject.target.describe_runtime(),
        created=dt.datetime.now().astimezone().isoformat(timespec="seconds"),
        summary=quantization.summarize() if quantization else "",
        inputs=[_format_value(value) for value in graph.inputs],
        outputs=[_format_value(value) for value in graph.outputs],
        example=[str(TensorType.of(x)) for x in subject.example],
        parameters=sum(v.data.numel() for v in graph.constants.values() if isinstance(v.data, torch.nn.Parameter)),
        bytes_before=before,
        bytes_after=after,
        bytes_of_file=results.bytes_of_file,
        modules=build_module_records(nodes),
        nodes=nodes,
        values=[*values.values()],
        what_if=quantization.what_if if quantization else [],
        chosen=_find_chosen_row(quantization, subject.settings) if quantization else None,
        targets=[*own, *subject.others],
        latency=_sum_latency(results, nodes),
        warnings=[*subject.warnings, *_describe_unquantized_nodes(results.explanation)],
        reproduction=collect_reproduction(subject.settings, subject.target.name, subject.registry, subject.seconds),
        unavailable={**_explain_empty_parts(subject), **results.unavailable},
    )


def _query_runtime(subject: ReportFacts, written: Graph, step: Callable[[str], None]) -> _RuntimeResults:
    """Write an artifact and query the runtime for precisions and times, or return the reasons for missing results."""
    target, quantization = subject.target, subject.found
    try:
        check_supported(written, target)
        with compile_temporarily(written, target) as file:
            return _query_artifact(file, subject, written, step)
    except TargetError as error:
        row = None if quantization is None else make_unsupported_row(target, error)
        return _RuntimeResults(unavailable={"runtime": str(error), "latency": str(error)}, row=row)


def _query_artifact(
    file: Artifact, subject: ReportFacts, written: Graph, step: Callable[[str], None]
) -> _RuntimeResults:
    target, example, size = subject.target, subject.example, file.facts.get("bytes")
    step("querying the runtime")
    try:
        explanation = explain_artifact(written, file, subject.plan, target, example)
    except TargetError as error:
        reason = str(error)
        row = _own_row(subject, file, None, reason)
        return _RuntimeResults(bytes_of_file=size, unavailable={"runtime": reason, "latency": reason}, row=row)
    step("timing nodes")
    try:
        reason = find_no_times_reason(target)
        seconds = {} if reason else target.profile(file, to_cpu(example))
    except TargetError as error:
        seconds, reason = {}, str(error)
    step("timing calls")
    row = _own_row(subject, file, explanation)
    return _RuntimeResults(explanation, size, seconds, {"latency": reason} if reason else {}, row)


def find_no_times_reason(target: Target) -> str:
    """Return why a target reports no node times, or an empty string if it does."""
    if emulator := target.emulated_by:
        return (
            f"cannot report times: {emulator} emulates {target.name} on this machine. Profile the file with "
            f"{target.name} itself."
        )
    if not target.has_node_times():
        return f"cannot report times: the target {target.name} does not implement `profile`."
    return target.unavailable_reason() or ""


def _sum_latency(results: _RuntimeResults, nodes: Sequence[NodeRecord]) -> LatencyRecord | None:
    if not results.seconds:
        return None
    total = sum(results.seconds.values())
    return LatencyRecord(total, total - sum(node.seconds for node in nodes if node.seconds is not None))


def _own_row(
    subject: ReportFacts, file: Artifact, explanation: Explanation | None, unavailable_reason: str = ""
) -> TargetFacts | None:
    """Return the target's own row of the comparison; None if the quantization decision is unknown."""
    target, quantization = subject.target, subject.found
    if quantization is None:
        return None
    try:
        return make_row(
            quantization,
            target,
            file,
            explanation,
            subject.example,
            in_float=partial(make_float_graph, subject.graph, target, subject.registry, subject.form),
            unavailable_reason=unavailable_reason,
        )
    except (ModelError, TargetError) as error:
        return make_unsupported_row(target, error)


def _find_chosen_row(quantization: Quantization, settings: Settings) -> ChosenRow:
    """Return the chosen entry of the threshold table."""
    request, layers = settings.global_quantization_settings, quantization.layers
    is_by_threshold = request is not None and request.automatic_skip_quantization
    count = sum(not layer.reason for layer in layers)
    sqnr = next((row.sqnr for row in quantization.what_if if row.layers == count), None)
    threshold = request.quantization_sensitivity_threshold if request and is_by_threshold else None
    return ChosenRow(threshold, count, len(layers), quantization.bytes, sqnr)


def _describe_unquantized_nodes(explanation: Explanation | None) -> list[str]:
    if explanation is None or not explanation.not_quantized:
        return []
    nodes, planned = explanation.not_quantized, sum(n.planned != FLOAT_PRECISION for n in explanation.nodes)
    names = ", ".join(node.scope or node.name for node in nodes[:MAX_NAMED_NODES])
    more = f" and {len(nodes) - MAX_NAMED_NODES:,} more" if len(nodes) > MAX_NAMED_NODES else ""
    return [
        f"{len(nodes):,} of {planned:,} quantized nodes run in float: {names}{more}. `clika_explain` lists the reasons."
    ]


def _explain_empty_parts(subject: ReportFacts) -> dict[str, str]:
    """Return the parts that must stay empty for this module, with the reasons."""
    unknown = {"reproduction": find_irreproducible_steps(subject.graph, subject.settings, subject.seconds)}
    if subject.plan is None:
        unknown |= dict.fromkeys((*DECISION_PARTS, "values"), FLOAT_MODULE_MESSAGE)
    elif subject.found is None:
        unknown |= dict.fromkeys(DECISION_PARTS, NO_DECISIONS_MESSAGE)
    if subject.plan is not None and subject.table is None:
        unknown["values"] = NO_RANGES_MESSAGE
    return {part: reason for part, reason in unknown.items() if reason}


def _format_value(value: Value) -> str:
    return f"{value.name}: {value.type}"
