"""Export the graph of a ClikaModule to a verified artifact: clone, rename, fuse, compile for the target, compare."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from clika_ref.compiled.latency import take_one_sample
from clika_ref.compiled.lowering import check_supported, lower_for, target_for
from clika_ref.core.artifacts import Artifact
from clika_ref.core.errors import ModelError, format_count
from clika_ref.core.ir import Graph
from clika_ref.core.registry import Registry
from clika_ref.core.symbols import Guard
from clika_ref.core.targets import Target
from clika_ref.export.artifact_check import compare_artifact
from clika_ref.export.configuration import ExportConfiguration
from clika_ref.export.dynamic_axes import filter_examples, restrict_dynamic_dims
from clika_ref.export.export_graph import apply_form, make_float_graph
from clika_ref.export.fp16 import check_overflow
from clika_ref.export.guard_checks import insert_guard_checks, warn_of_unchecked_guards
from clika_ref.export.interface import name_interface
from clika_ref.export.needed_guards import find_needed_guards
from clika_ref.export.quantized_check import compare_quantized
from clika_ref.export.speed import add_speed, can_time
from clika_ref.quantization.qdq.insertion import Plan, quantize_graph
from clika_ref.quantization.weight_checks import nan_warning
from clika_ref.reporting.console import format_size
from clika_ref.reporting.log import CompilationLog
from clika_ref.serialization.atomic_files import require_path, resolve_links, stage_file
from clika_ref.settings.compile_options import BaseDeploymentSettings, ClikaCompileOptions
from clika_ref.targets.file_suffixes import suffix_error
from clika_ref.targets.size_statistics import SymbolSizes, translate_sizes


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
    is_guarded: bool = False
    """Whether the guards are checked before each call of the artifact."""


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
    target = target_for(deployment, registry, request.plan)
    path = request.file
    _warn_of_nan(request.graph, log)
    names = restrict_dynamic_dims(
        request.graph, request.dynamic_axes, request.examples, request.input_names, request.output_names
    )
    plain = request.graph.clone() if _is_timed(request, target) else None
    with log.stage("Fusing") as stage:
        graph, examples = _fuse(request, registry, target, log)
        stage.done(format_count(len(graph), "node"))
    unchecked = _check_guards(request, graph)
    check_supported(graph, target)
    observed = translate_sizes(request.seen, names)
    with stage_file(path) as staged:
        with log.stage("Writing") as stage:
            artifact = target.compile(graph, staged, external_data=request.options.external_data, observed=observed)
            stage.done(f"{path.name}, {format_size(artifact.facts.get('bytes', 0))}")
        for warning in artifact.facts.get("warnings", ()):
            log.warning(f"{artifact.path.name}: {warning}")
        for note in artifact.facts.get("notes", ()):
            log.show(f"{artifact.path.name}: {note}")
        _warn_of_broken_rules(target, artifact, log)
        warn_of_unchecked_guards(unchecked, graph, log)
        if request.options.compare_after_export and examples:
            with log.stage("Comparing") as stage:
                stage.done(_compare(request, artifact, target, graph, examples))
            if plain is not None:
                form = replace(request.configuration, keep_outputs_at_idx=None)  # the graph has only these
                make_plain = partial(make_float_graph, plain, target, registry, form)
                inputs = take_one_sample(graph, examples[0])
                artifact = add_speed(artifact, graph, target, inputs, log, make_plain=make_plain)
    # Runtimes look for external data next to the given path; next to a link there is none.
    written = resolve_links(path) if path.is_symlink() else path
    log.detail(f"Saved final model: {written}")
    return replace(artifact, path=written)


def _warn_of_nan(graph: Graph, log: CompilationLog) -> None:
    """Warn if weights are NaN, as after failed training: module and artifact would agree on NaN results."""
    weights = {name: v.data for name, v in graph.constants.items() if v.data is not None and name not in graph.state}
    warning = nan_warning(weights)
    if warning is not None:
        log.warning(warning)


def _fuse(
    request: ExportRequest, registry: Registry, target: Target, log: CompilationLog
) -> tuple[Graph, list[Sequence[torch.Tensor]]]:
    """Lower the graph of a request and name its interface; return it, with the examples that it accepts."""
    graph, operators, form = request.graph, registry.operators, request.configuration
    examples = filter_examples(graph, request.examples)
    check_inputs = examples[0] if request.options.check_passes and examples else None
    reports = lower_for(request.plan, graph, registry, target, check_inputs)
    if request.plan is not None:
        quantize_graph(graph, request.plan, operators)
    apply_form(graph, target, form, operators)
    name_interface(graph, operators, request.input_names, request.output_names)
    log.report_removals(reports)
    return graph, examples


def _check_guards(request: ExportRequest, graph: Graph) -> list[Guard]:
    """Make guards part of a lowered graph as requested, and return those that nothing checks."""
    if request.is_guarded:
        return []
    guards = find_needed_guards(graph)
    is_unchecked = request.configuration.allow_unchecked_guards
    return guards if is_unchecked else insert_guard_checks(graph, guards)


def _warn_of_broken_rules(target: Target, artifact: Artifact, log: CompilationLog) -> None:
    """Warn if a file breaks rules of its target, which may reject it, or run it more slowly."""
    found = target.check(artifact.path)
    if found:
        shown = "\n".join(f"  {violation}" for violation in found)
        log.warning(f"{artifact.path.name} violates {len(found)} rules of {target.name}:\n{shown}")


def _compare(
    request: ExportRequest, artifact: Artifact, target: Target, graph: Graph, examples: Sequence[Sequence[torch.Tensor]]
) -> str:
    """Compare an artifact with the module: element by element, or by SQNR if it is quantized, FP16 or BF16."""
    half = request.configuration.half
    if half is not None:
        check_overflow(graph, examples[0], request.expected)
    is_exact = half is None and (request.plan is None or request.plan.is_empty)
    return (compare_artifact if is_exact else compare_quantized)(artifact, target, graph, examples, request.expected)


def _is_timed(request: ExportRequest, target: Target) -> bool:
    """Return whether to time the artifact: it is quantized, and its own runtime runs here."""
    is_quantized = request.plan is not None and not request.plan.is_empty
    return is_quantized and can_time(target) and request.options.compare_after_export


def artifact_path(file: Any, deployment: BaseDeploymentSettings, registry: Registry) -> Path:
    """Return the path of an artifact.

    Raises:
        ModelError: it is no path, or it, or the file that it links to, has a suffix that the target does not write.
    """
    path = require_path(file, "model.onnx", name="file")
    fault = suffix_error(resolve_links(path), deployment.target, registry.targets, "deployment_settings of")
    if fault is not None:
        raise ModelError(f"cannot write {str(path)!r}: {fault}")
    return path
