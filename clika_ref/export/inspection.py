"""Inspect a module: the precision of its nodes, its picture, its report, and its display in notebooks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from html import escape
from os import PathLike
from pathlib import Path
from typing import Any

import torch

from clika_ref.capture.surrounding_autocast import outside_autocast
from clika_ref.compiled.lowering import quantize_for_target, target_for
from clika_ref.compiled.quantization_state import target_of
from clika_ref.compiled.state import CompiledModule, bind_graph, learned_quantization
from clika_ref.compiled.weights import weights_of
from clika_ref.compress.quantize import plan_for, warn_of_changed_weights
from clika_ref.core.errors import ModelError, format_count, format_install_command
from clika_ref.core.ir import Graph
from clika_ref.core.registry import Registry
from clika_ref.export.configuration import current_configuration
from clika_ref.export.explanation import Explanation, explain
from clika_ref.export.module_export import bind_exportable_graph, list_examples
from clika_ref.export.target_comparison import TargetFacts, compare_targets
from clika_ref.export.visualization import (
    VISUALIZER_DISTRIBUTION,
    PictureFacts,
    ReportFacts,
    require_visualizer,
)
from clika_ref.reporting.log import CompilationLog
from clika_ref.serialization.atomic_files import require_suffix, write_atomically
from clika_ref.settings.argument_checks import check_types
from clika_ref.settings.compile_options import (
    BaseDeploymentSettings,
    DeploymentSettings_ONNXRuntime_ONNX,
)
from clika_ref.settings.settings import LayerSettings, Settings

REPORT_SUFFIX = ".html"

MAX_NOTEBOOK_NODES = 300
"""Maximum number of nodes for a picture in a notebook; larger models are drawn to a file."""

SCROLL_STYLE = "max-height: 480px; overflow: auto; border: 1px solid #d5dbe2"


def explain_module(module: CompiledModule, deployment_settings: BaseDeploymentSettings | None) -> Explanation:
    """Export a module and return the precision of each node in the runtime: see `ClikaModule.clika_explain`.

    Raises:
        ModelError: ``deployment_settings`` have the wrong type, or the requested form is not available.
        TargetError: the target rejects a node, or its runtime is not installed.
    """
    check_types({"deployment_settings": deployment_settings})
    graph, state = bind_exportable_graph(module), module.clika_state
    deployment = state.choose_deployment(deployment_settings)
    plan = plan_for(module, graph, deployment)
    with outside_autocast():
        target, example = target_for(deployment, state.registry, plan), list_examples(module, graph, None)[0]
        return explain(
            graph,
            plan,
            target,
            state.registry,
            example,
            form=current_configuration(),
            is_timed=state.options.compare_after_export,
        )


def draw_module(module: CompiledModule, path: str | PathLike[str], explanation: Explanation | None) -> Path:
    """Draw a module to a file, and return its path: see `ClikaModule.clika_visualize`.

    Raises:
        ModelError: the suffix is unsupported, the file cannot be written, or the module is empty.
        PluginError: no plugin draws pictures.
        TargetError: no plugin provides the target that the module is quantized for.
    """
    if not isinstance(explanation, Explanation | None):
        raise ModelError(
            f"explanation is {explanation!r}, a {type(explanation).__name__}. Pass the result of clika_explain()."
        )
    registry = module.clika_state.registry
    visualizer = require_visualizer(registry, "clika_visualize")
    file = visualizer.picture_path(path)
    with CompilationLog.open(module.clika_state.logs_dir) as log, log.stage("Drawing") as stage:
        facts = replace(_picture_facts(module, registry), explanation=explanation)
        if file.exists():
            log.detail(f"Visualization: file exists: {file}, Overwriting")
        visualizer.draw(facts, file)
        stage.done(file.name)
        log.detail(f"Saved graph visualization to: {file}")
    return file


def _picture_facts(module: CompiledModule, registry: Registry) -> PictureFacts:
    """Return the graph, lowered and quantized if the module is quantized, with its plan and a subtitle."""
    graph, own = bind_graph(module), learned_quantization(module)
    if own is None:
        return PictureFacts(graph)
    target = target_of(own, registry)
    with torch.no_grad(), outside_autocast():
        graph = quantize_for_target(graph, own.plan, target, registry)
    return PictureFacts(graph, own.plan, subtitle=f"as for {target.describe_runtime()}")


def render_notebook_html(module: CompiledModule) -> str:
    """Return HTML for notebooks: a one-line summary, the picture, and the tables of decisions."""
    if module.clika_state.is_empty:
        return f"<p>{escape(repr(module))}</p>"
    registry = module.clika_state.registry
    facts = _picture_facts(module, registry)
    graph = facts.graph
    weights = weights_of(module, module.clika_state.graph).values()  # without learned scales
    parameters = sum(weight.numel() for weight in weights if isinstance(weight, torch.nn.Parameter))
    counts = ", ".join(
        part
        for part in (format_count(len(graph), "node"), format_count(parameters, "parameter"), facts.subtitle)
        if part
    )
    parts = [f"<p><b>{escape(graph.name)}</b>: {escape(counts)}</p>"]
    if not registry.visualizers:
        parts.append(f"<p>To draw it, run {format_install_command(VISUALIZER_DISTRIBUTION)}.</p>")
    elif len(graph) <= MAX_NOTEBOOK_NODES:
        picture = require_visualizer(registry, "_repr_html_").render_svg(facts)
        parts.append(f'<div style="{SCROLL_STYLE}">{picture}</div>')
    else:
        parts.append("<p>clika_visualize(&quot;model.html&quot;) draws it</p>")
    quantized = module.clika_state.quantized
    found = quantized and quantized.found
    if found is not None:
        parts.append(f"<details><summary>Decisions</summary>{found._repr_html_()}</details>")
    return "".join(parts)


def write_report(module: CompiledModule, path: str | PathLike[str], deployments: Any) -> Path:
    """Write a report on a module as one HTML file, and return its path: see `ClikaModule.clika_report`.

    Raises:
        ModelError: the path has another suffix or cannot be written, the module returns no tensor, or ``deployments``
            have the wrong type, or need ranges that the module does not hold.
        PluginError: no plugin writes reports.
        TargetError: no plugin provides a target.
    """
    visualizer = require_visualizer(module.clika_state.registry, "clika_report")
    target_path, deployments = require_suffix(path, "a report", [REPORT_SUFFIX]), _check_deployments(deployments)
    graph = bind_exportable_graph(module)
    with write_atomically(target_path) as file:  # first, so that an invalid path fails early
        others = compare_targets(module, deployments).rows if deployments else ()
        with (
            CompilationLog.open(module.clika_state.logs_dir) as log,
            log.stage("Reporting") as stage,
            outside_autocast(),
        ):
            size = visualizer.write_report(_report_facts(module, graph, others, log), file, stage.update)
            stage.done(f"{target_path.name}, {size}")
    return target_path


def _report_facts(
    module: CompiledModule, graph: Graph, others: Sequence[TargetFacts], log: CompilationLog
) -> ReportFacts:
    """Return the facts for a report, with a warning if the weights have changed since their scales were computed."""
    state = module.clika_state
    own, request = state.quantized, state.request
    deployment = state.deployment_settings or DeploymentSettings_ONNXRuntime_ONNX()
    plan = plan_for(module, graph, deployment)
    warn_of_changed_weights(module, graph, plan, log)
    given, layers = (request.given, request.layers) if request and own else (None, {})
    settings = Settings(  # those of an earlier pruning are not available any more
        deployment_settings=deployment,
        global_quantization_settings=given,
        global_lora_settings=state.options.global_lora_settings,
        layer_settings={name: LayerSettings(layer) for name, layer in layers.items()},
        clika_compile_options=replace(state.options, global_lora_settings=None),
    )
    return ReportFacts(
        graph,
        target_for(deployment, state.registry, plan),
        state.registry,
        current_configuration(),
        list_examples(module, graph, None)[0],
        settings,
        plan,
        own.found if own and own.target == deployment.target else None,
        state.calibration.table if state.calibration else None,
        (*state.warnings, *log.warnings),
        dict(state.timings),
        others,
    )


def _check_deployments(deployments: Any) -> Sequence[BaseDeploymentSettings]:
    """Return deployment settings after checking their type.

    Raises:
        ModelError: they are no list of deployment settings.
    """
    if not isinstance(deployments, Sequence) or not all(isinstance(d, BaseDeploymentSettings) for d in deployments):
        raise ModelError(
            f"deployments is {deployments!r}. Give a list of deployment settings, such as "
            "[DeploymentSettings_OpenVINO_ONNX(), DeploymentSettings_TensorRT_ONNX()]."
        )
    return deployments
