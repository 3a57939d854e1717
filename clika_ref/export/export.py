"""Export the graph of a ClikaModule to a verified artifact: clone, rename, fuse, compile for the target, compare."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from clika_ref.core.errors import ModelError, TargetError
from clika_ref.core.ir import Graph, Node, Value
from clika_ref.core.operators import Operator
from clika_ref.core.passes import PassReport, Phase, Pipeline
from clika_ref.core.registry import Registry
from clika_ref.core.targets import Artifact, Target
from clika_ref.core.violations import checker_of
from clika_ref.export.artifact_check import compare_artifact
from clika_ref.export.configuration import ExportConfiguration
from clika_ref.export.dynamic_axes import filter_examples, restrict_dynamic_dims
from clika_ref.export.half_precision import check_overflow, convert_to_half
from clika_ref.export.interface import name_interface
from clika_ref.export.quantized_check import compare_quantized
from clika_ref.export.unchecked_guards import warn_of_unchecked_guards
from clika_ref.lora.lowering import detach_adapters, reattach_adapters
from clika_ref.quantization.algorithms.smooth_quant import apply_smoothing
from clika_ref.quantization.qdq.insertion import Plan, quantize_graph
from clika_ref.quantization.qdq.packed_weights import set_int4_storage
from clika_ref.quantization.weight_checks import nan_warning
from clika_ref.reporting.console import format_size
from clika_ref.reporting.log import CompilationLog
from clika_ref.serialization.atomic_files import require_path, resolve_links, stage_file
from clika_ref.settings.compile_options import BaseDeploymentSettings, ClikaCompileOptions, target_hint
from clika_ref.targets.opened_files import suffix_error
from clika_ref.targets.size_statistics import SymbolSizes, translate_sizes

DEQUANTIZE_OPERATOR = "dequantize"
"""The operator that converts integers to floats."""


@dataclass(frozen=True)
class ExportRequest:
    """An export: a clone of the stored graph that shares its weights, the file, and the names.

    ``examples`` are inputs of the graph for comparing the artifact; ``expected`` computes the reference outputs.
    """

    graph: Graph
    file: Path
    examples: Sequence[Sequence[torch.Tensor]]
    expected: Callable[[Sequence[torch.Tensor]], Sequence[torch.Tensor]]
    input_names: tuple[str, ...] = ()
    """A name for each input; empty to keep those of the graph."""
    output_names: tuple[str, ...] = ()
    """A name for each output; empty to keep those of the graph."""
    dynamic_axes: Mapping[str, Any] | None = None
    """The dims to leave dynamic, by input name; None for all dynamic dims of the graph."""
    plan: Plan | None = None
    """The quantization plan; None for a float model."""
    options: ClikaCompileOptions = field(default_factory=ClikaCompileOptions)
    """Whether to compare the artifact, to check each pass, and to write external data."""
    seen: Mapping[SymbolSizes, int] = field(default_factory=dict[SymbolSizes, int])
    """Sizes that the artifact should serve, with counts, for targets that optimize for the usual ones."""
    configuration: ExportConfiguration = field(default_factory=ExportConfiguration)
    """The form of the export; ``graph`` contains only the selected outputs already."""


def export(
    request: ExportRequest, deployment: BaseDeploymentSettings, registry: Registry, log: CompilationLog
) -> Artifact:
    """Write the artifact to a temporary file, compare it with the module, and only then replace the file.

    If ``file`` is a symbolic link, the file that it points to is replaced, and its path is returned.

    Args:
        request: the graph, its plan, the file and the names.
        deployment: the target and its options.
        registry: the plugins.
        log: receives the duration and result of each step.

    Raises:
        ModelError: a name or an axis does not fit, or the file cannot be written.
        TargetError: the target is unknown, rejects nodes, or computes different results.
    """
    target = target_for(deployment, registry)
    path = request.file
    _warn_of_nan(request.graph, log)
    names = restrict_dynamic_dims(
        request.graph, request.dynamic_axes, request.examples, request.input_names, request.output_names
    )
    with log.stage("Fusing") as stage:
        graph, examples = _fuse(request, registry, target, log)
        stage.done(f"{len(graph):,} nodes")
    check_supported(graph, target)
    observed = translate_sizes(request.seen, names)
    with stage_file(path) as place:
        with log.stage("Writing") as stage:
            artifact = target.compile(graph, place, external_data=request.options.external_data, observed=observed)
            stage.done(f"{path.name}, {format_size(artifact.facts.get('bytes', 0))}")
        for told in artifact.facts.get("warnings", ()):
            log.warning(f"{artifact.path.name}: {told}")
        _warn_of_broken_rules(target, artifact, log)
        if request.options.compare_after_export and examples:
            with log.stage("Comparing") as stage:
                stage.done(_compare(request, artifact, target, graph, examples))
    warn_of_unchecked_guards(graph, log)
    # Runtimes look for external data next to the given path; next to a link there is none.
    place = resolve_links(path) if path.is_symlink() else path
    log.detail(f"Saved final model: {place}")
    return replace(artifact, path=place)


def _warn_of_nan(graph: Graph, log: CompilationLog) -> None:
    """Warn if weights are NaN, as after failed training: module and artifact would agree on NaN results."""
    held = {name: v.data for name, v in graph.constants.items() if v.data is not None and name not in graph.state}
    told = nan_warning(held)
    if told is not None:
        log.warning(told)


def _fuse(
    request: ExportRequest, registry: Registry, target: Target, log: CompilationLog
) -> tuple[Graph, list[Sequence[torch.Tensor]]]:
    """Lower the graph of a request and name its interface; return it, with the examples that it accepts."""
    graph, operators, form = request.graph, registry.operators, request.configuration
    examples = filter_examples(graph, request.examples)
    check_inputs = examples[0] if request.options.check_passes and examples else None
    reports = lower_for(request.plan, graph, registry, target, check_inputs)
    _apply_form(graph, request.plan, target, form, operators)
    name_interface(graph, operators, request.input_names, request.output_names)
    log.removed(reports)
    return graph, examples


def make_export_graph(
    graph: Graph, plan: Plan | None, target: Target, registry: Registry, form: ExportConfiguration
) -> Graph:
    """Return a clone of a module's graph as lowered for a target, without the names and dims that an export chooses.

    Raises:
        ModelError: the form names an output that does not exist, or requires INT4 weights and there are none.
        TargetError: the form excludes INT4, and the target supports no other format for these weights.
    """
    clone = graph.clone(form.kept(graph.outputs))
    lower_for(plan, clone, registry, target)
    _apply_form(clone, plan, target, form, registry.operators)
    return clone


def _apply_form(
    graph: Graph, plan: Plan | None, target: Target, form: ExportConfiguration, operators: Mapping[str, Operator]
) -> None:
    """Quantize a lowered graph by a plan, pack its INT4 weights, and convert it to FP16 or BF16 if requested."""
    if plan is not None:
        quantize_graph(graph, plan, operators)
    set_int4_storage(graph, target, as_such=form.export_int4)
    if form.half is not None:
        convert_to_half(graph, form.half, operators)
    graph.drop_unused_constants()


def _warn_of_broken_rules(target: Target, artifact: Artifact, log: CompilationLog) -> None:
    """Warn if a file breaks rules of its target, which may reject it, or run it more slowly."""
    check = checker_of(target)
    found = check(artifact.path) if check is not None else ()
    if found:
        shown = "\n".join(f"  {violation}" for violation in found)
        log.warning(f"{artifact.path.name} breaks rules of {target.name} in {len(found)} places:\n{shown}")


def _compare(
    request: ExportRequest, artifact: Artifact, target: Target, graph: Graph, examples: Sequence[Sequence[torch.Tensor]]
) -> str:
    """Compare an artifact with the module: element by element, or by SQNR if it is quantized or in half precision."""
    half = request.configuration.half
    if half is not None:
        check_overflow(graph, examples[0], request.expected)
    is_exact = half is None and (request.plan is None or request.plan.is_empty)
    return (compare_artifact if is_exact else compare_quantized)(artifact, target, graph, examples, request.expected)


def target_named(name: str, registry: Registry) -> Target:
    """Return the target of a name with its default configuration.

    Raises:
        TargetError: no plugin provides it.
    """
    if name not in registry.targets:
        known = ", ".join(sorted(registry.targets)) or "none"
        remedy = target_hint(name, registry.targets)
        msg = f"no installed plugin provides the target {name!r} (installed: {known}); {remedy}"
        raise TargetError(msg)
    return registry.targets[name]


def target_for(deployment: BaseDeploymentSettings, registry: Registry) -> Target:
    """Return the target of the registry that deployment settings name, configured by them.

    Raises:
        TargetError: no plugin provides it.
    """
    target = target_named(deployment.target, registry)
    configured = getattr(target, "configure", None)
    return configured(deployment) if configured is not None else target


def lower(
    graph: Graph,
    registry: Registry,
    target: Target,
    check_inputs: Sequence[torch.Tensor] | None = None,
    *,
    for_any_weights: bool = False,
) -> list[PassReport]:
    """Run the passes that fold parameters, and those of the target, on a clone.

    For training, pass ``for_any_weights``: it omits passes that are only valid for the current weights.
    """
    passes = {**registry.passes, **{p.name: p for p in target.passes()}}
    if for_any_weights:
        passes = {name: p for name, p in passes.items() if getattr(p, "for_any_weights", True)}
    pipeline = Pipeline.of(passes, registry.operators, Phase.FUSE, check_inputs=check_inputs)
    reports = pipeline.run(graph)
    graph.drop_unused_constants()
    return reports


def lower_for(
    plan: Plan | None,
    graph: Graph,
    registry: Registry,
    target: Target,
    check_inputs: Sequence[torch.Tensor] | None = None,
    *,
    for_any_weights: bool = False,
) -> list[PassReport]:
    """Lower a clone until a plan can quantize it: run the passes, apply SmoothQuant, and merge or add adapters.

    With adapters, layers of equal weights must not be merged, since their adapters differ.

    Args:
        plan: the quantization plan; None for a float model.
        graph: the clone.
        registry: the operators and passes.
        target: its passes run as well.
        check_inputs: one tensor for each input; if given, each pass must reproduce the results before it.
        for_any_weights: omit passes that are only valid for the current weights.

    Raises:
        ModelError: a pass changed a layer in a way that cannot be applied to its adapter.
    """
    aside = detach_adapters(graph, is_quantized=plan is not None)
    reports = lower(graph, registry, target, check_inputs, for_any_weights=for_any_weights or bool(aside))
    if plan is not None:
        apply_smoothing(graph, plan.smoothing, registry.operators)
    reattach_adapters(graph, aside, registry.operators)
    return reports


def check_supported(graph: Graph, target: Target) -> None:
    """Raise an error if the target cannot run some nodes of a graph.

    Raises:
        TargetError: there are such nodes; all are listed, equal ones once, with a note if they would run in float.
    """
    refused = [(node, reason) for node in graph.nodes if (reason := target.refusal(node)) is not None]
    if refused:
        alike = Counter((f"{n.op.name} in {n.origin}", reason + _float_hint(n, target)) for n, reason in refused)
        shown = "\n".join(
            f"  {where}{f', {count:,} nodes' * (count > 1)}: {reason}" for (where, reason), count in alike.items()
        )
        msg = f"{target.name} cannot run {len(refused)} nodes of {graph.name}:\n{shown}"
        raise TargetError(msg)


def _float_hint(node: Node, target: Target) -> str:
    """Return a note for a node with dequantized operands, whether it would run in float; empty for other nodes."""
    made = {v: v.producer for v in node.inputs if isinstance(v, Value) and v.producer is not None}
    if not any(producer.kind == DEQUANTIZE_OPERATOR for producer in made.values()):
        return ""
    alone = Graph(node.name)
    stand_ins = {v: alone.add_input(v.type, v.name) for v in node.inputs if isinstance(v, Value)}
    operands = [stand_ins[v] if isinstance(v, Value) else v for v in node.inputs]
    twin = alone.insert(Node(node.op, operands, node.attrs, node.origin), [v.type for v in node.outputs])
    helps = "kept float it would run: LayerQuantizationSettings(skip_quantization=True)"
    return f"; {helps}" if target.refusal(twin) is None else "; keeping it float does not help"


def artifact_path(file: Any, deployment: BaseDeploymentSettings, registry: Registry) -> Path:
    """Return the path of an artifact.

    Raises:
        ModelError: it is no path, or it, or the file that it links to, has a suffix that the target does not write.
    """
    path = require_path(file, "model.onnx", name="file")
    fault = suffix_error(resolve_links(path), deployment.target, registry.targets, "deployment_settings of")
    if fault is not None:
        msg = f"cannot write {str(path)!r}: {fault}"
        raise ModelError(msg)
    return path
