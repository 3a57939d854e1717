"""Build the contents of a report from the plan, the observed ranges, the runtime and measured times."""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from clika_ref.compiled.lowering import check_supported
from clika_ref.compiled.runners import to_cpu
from clika_ref.core.artifacts import Artifact
from clika_ref.core.errors import ModelError, TargetError
from clika_ref.core.ir import Graph, Value
from clika_ref.core.targets import Target
from clika_ref.export.explanation import Explanation, compile_temporarily, explain_artifact
from clika_ref.export.export import make_export_graph
from clika_ref.export.target_comparison import TargetFacts, make_row, make_unsupported_row
from clika_ref.export.visualization import ReportFacts
from clika_ref.quantization.decision import Quantization
from clika_ref.quantization.report import NO_DECISIONS_MESSAGE, summarize_quantization
from clika_ref.settings.settings import Settings
from clika_ref_visualize.report.contents import ChosenRow, LatencyRecord, NodeRecord, ReportContents, WhatIfRecord
from clika_ref_visualize.report.file_bytes import count_constant_bytes
from clika_ref_visualize.report.module_tree import module_records
from clika_ref_visualize.report.node_records import KnownFacts, node_records
from clika_ref_visualize.report.reproduction import collect_reproduction, irreproducible_reason
from clika_ref_visualize.report.value_records import value_records

FLOAT_MODULE_MESSAGE = (
    "the module is float, and nothing of it is quantized; clika_initialize_algorithms(calibration_inputs=...) "
    "quantizes it"
)

NO_RANGES_MESSAGE = (
    "the module does not know what its values held: it is a copy, or was loaded without calibration inputs; "
    "clika_initialize_algorithms(calibration_inputs=...) finds that anew"
)

DECISION_PARTS = ("sensitivity", "what_if", "targets")
"""Parts that are empty if the quantization decision is unknown."""


@dataclass(frozen=True)
class _RuntimeResults:
    """Results from the target's runtime."""

    explanation: Explanation | None = None
    bytes_of_file: int | None = None
    seconds: Mapping[str, float] = field(default_factory=dict[str, float])
    missing: Mapping[str, str] = field(default_factory=dict[str, str])
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
    graph, plan, found = subject.graph, subject.plan, subject.found
    step("writing an artifact")
    written = make_export_graph(graph, plan, subject.target, subject.registry, subject.form)
    asked = _query_runtime(subject, written, step)
    values = value_records(written, plan, subject.table, found.observers if found else {})
    places = {value: place for place, value in enumerate(values)}
    told = KnownFacts(subject.target.scheme, plan, found, asked.explanation, asked.seconds)
    nodes = node_records(written, told, places)
    before, after = count_constant_bytes(written)
    own = [] if asked.row is None else [asked.row]
    return ReportContents(
        model=graph.name,
        target=subject.target.describe_runtime(),
        made=dt.datetime.now().astimezone().isoformat(timespec="seconds"),
        summary=summarize_quantization(found) if found else "",
        inputs=[_value_text(value) for value in graph.inputs],
        outputs=[_value_text(value) for value in graph.outputs],
        example=[f"{str(x.dtype).removeprefix('torch.')}{[*x.shape]}" for x in subject.example],
        parameters=sum(v.data.numel() for v in graph.constants.values() if isinstance(v.data, torch.nn.Parameter)),
        bytes_before=before,
        bytes_after=after,
        bytes_of_file=asked.bytes_of_file,
        modules=module_records(nodes),
        nodes=nodes,
        values=[*values.values()],
        what_if=[WhatIfRecord(row.threshold, row.layers, row.bytes, row.sqnr) for row in found.what_if]
        if found
        else [],
        chosen=_find_chosen_row(found, subject.settings) if found else None,
        targets=[*own, *subject.others],
        latency=_latency(asked, nodes),
        warnings=[*subject.warnings, *_describe_missed_nodes(asked.explanation)],
        repeat=collect_reproduction(subject.settings, subject.target.name, subject.registry, subject.seconds),
        missing={**_empty_part_reasons(subject), **asked.missing},
    )


def _query_runtime(subject: ReportFacts, written: Graph, step: Callable[[str], None]) -> _RuntimeResults:
    """Write an artifact and query the runtime for precisions and times, or return the reasons for missing results."""
    target, found = subject.target, subject.found
    try:
        check_supported(written, target)
        with compile_temporarily(written, target) as file:
            return _query_artifact(file, subject, written, step)
    except TargetError as error:
        row = None if found is None else make_unsupported_row(target, error)
        return _RuntimeResults(missing={"runtime": str(error), "latency": str(error)}, row=row)


def _query_artifact(
    file: Artifact, subject: ReportFacts, written: Graph, step: Callable[[str], None]
) -> _RuntimeResults:
    target, example, size = subject.target, subject.example, file.facts.get("bytes")
    step("asking the runtime")
    try:
        explanation = explain_artifact(written, file, subject.plan, target, example)
    except TargetError as error:
        reason = str(error)
        row = _own_row(subject, file, None, reason)
        return _RuntimeResults(bytes_of_file=size, missing={"runtime": reason, "latency": reason}, row=row)
    step("timing nodes")
    try:
        seconds, reason = _profile_nodes(target, file, example), no_times_reason(target)
    except TargetError as error:
        seconds, reason = {}, str(error)
    step("timing calls")
    row = _own_row(subject, file, explanation)
    return _RuntimeResults(explanation, size, seconds, {"latency": reason} if reason else {}, row)


def no_times_reason(target: Target) -> str:
    """Return why a target reports no node times, or an empty string if it does."""
    if stand_in := target.emulated_by:
        return f"{target.name} is emulated by {stand_in} here, whose times say nothing of it"
    if not target.has_node_times():
        return f"the target {target.name} reports no times of nodes: it does not implement `profile`"
    return target.unavailable_reason() or ""


def _profile_nodes(target: Target, artifact: Artifact, example: Sequence[torch.Tensor]) -> Mapping[str, float]:
    """Return the seconds of each node; empty for a target without node times."""
    return {} if no_times_reason(target) else target.profile(artifact, to_cpu(example))


def _latency(asked: _RuntimeResults, nodes: Sequence[NodeRecord]) -> LatencyRecord | None:
    if not asked.seconds:
        return None
    total = sum(asked.seconds.values())
    return LatencyRecord(total, total - sum(node.seconds for node in nodes if node.seconds is not None))


def _own_row(
    subject: ReportFacts, file: Artifact, explanation: Explanation | None, missing: str = ""
) -> TargetFacts | None:
    """Return the target's own row of the comparison; None if the quantization decision is unknown."""
    target, found = subject.target, subject.found

    def lower_float_graph() -> Graph:
        return make_export_graph(subject.graph, None, target, subject.registry, replace(subject.form, export_int4=None))

    if found is None:
        return None
    try:
        return make_row(found, target, file, explanation, subject.example, in_float=lower_float_graph, missing=missing)
    except (ModelError, TargetError) as error:
        return make_unsupported_row(target, error)


def _find_chosen_row(found: Quantization, settings: Settings) -> ChosenRow:
    """Return the chosen entry of the threshold table."""
    quantization, layers = settings.global_quantization_settings, found.layers
    is_by_threshold = quantization is not None and quantization.automatic_skip_quantization
    count = sum(not layer.reason for layer in layers)
    sqnr = next((row.sqnr for row in found.what_if if row.layers == count), None)
    threshold = quantization.quantization_sensitivity_threshold if quantization and is_by_threshold else None
    return ChosenRow(threshold, count, len(layers), found.bytes, sqnr)


def _describe_missed_nodes(explanation: Explanation | None) -> list[str]:
    missed = explanation.missed if explanation else []
    if not missed:
        return []
    names = ", ".join(node.scope or node.name for node in missed[:3])
    more = f" and {len(missed) - 3:,} more" if len(missed) > 3 else ""
    return [f"{len(missed):,} nodes that were planned in integers run in float: {names}{more}"]


def _empty_part_reasons(subject: ReportFacts) -> dict[str, str]:
    """Return the parts that must stay empty for this module, with the reasons."""
    unknown = {"repeat": irreproducible_reason(subject.graph, subject.settings, subject.seconds)}
    if subject.plan is None:
        unknown |= dict.fromkeys((*DECISION_PARTS, "values"), FLOAT_MODULE_MESSAGE)
    elif subject.found is None:
        unknown |= dict.fromkeys(DECISION_PARTS, NO_DECISIONS_MESSAGE)
    if subject.plan is not None and subject.table is None:
        unknown["values"] = NO_RANGES_MESSAGE
    return {part: reason for part, reason in unknown.items() if reason}


def _value_text(value: Value) -> str:
    return f"{value.name}: {value.type}"
