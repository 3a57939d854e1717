"""Lowering of a module's graph for a target: run the passes that fold parameters, apply SmoothQuant, quantize."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch

from clika_ref.core.errors import TargetError, format_count
from clika_ref.core.ir import Graph, Node, Value, walk
from clika_ref.core.passes import PassReport, Phase, Pipeline
from clika_ref.core.registry import Registry
from clika_ref.core.targets import Target
from clika_ref.lora.lowering import detach_adapters, reattach_adapters
from clika_ref.quantization.algorithms.smooth_quant import apply_smoothing
from clika_ref.quantization.qdq.insertion import Plan, quantize_graph
from clika_ref.settings.compile_options import BaseDeploymentSettings, target_hint

DEQUANTIZE_OPERATOR = "dequantize"
"""The operator that converts integers to floats."""


def target_named(name: str, registry: Registry) -> Target:
    """Return the target of a name with its default configuration.

    Raises:
        TargetError: no plugin provides it.
    """
    if name not in registry.targets:
        known = ", ".join(sorted(registry.targets)) or "none"
        hint = target_hint(name, registry.targets)
        raise TargetError(
            f"cannot use the target {name!r}: no installed plugin provides it (installed: {known}). {hint}"
        )
    return registry.targets[name]


def target_for(deployment: BaseDeploymentSettings, registry: Registry, plan: Plan | None = None) -> Target:
    """Return the target of the registry that deployment settings name, configured by them, and by a plan if given.

    Raises:
        TargetError: no plugin provides it.
    """
    return configure_for_plan(target_named(deployment.target, registry).configure(deployment), plan)


def configure_for_plan(target: Target, plan: Plan | None) -> Target:
    """Return a target that rounds the inputs of layers at run time, if a plan asks for it."""
    sizes = plan.rounded_inputs.values() if plan is not None else ()
    return target.with_rounded_inputs(max(sizes)) if sizes else target


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


def quantize_for_target(
    graph: Graph, plan: Plan | None, target: Target, registry: Registry, outputs: Sequence[Value] | None = None
) -> Graph:
    """Return a clone of a float graph as the target gets it, quantized with a plan; without a plan in float.

    Args:
        graph: that of a module, bound to its weights.
        plan: the quantization plan.
        target: its passes run.
        registry: the operators and passes.
        outputs: the outputs to keep; by default all.

    Raises:
        ModelError: an adapter cannot follow the changes of a pass to its layer.
    """
    clone = graph.clone(outputs)
    lower_for(plan, clone, registry, target)
    if plan is not None:
        quantize_graph(clone, plan, registry.operators)
    clone.drop_unused_constants()
    return clone


def check_supported(graph: Graph, target: Target) -> None:
    """Raise an error if the target cannot run some nodes of a graph.

    Raises:
        TargetError: there are such nodes; all are listed, equal ones once, with a note if they would run in float.
    """
    refused = [(node, reason) for node in walk(graph) if (reason := target.unsupported_reason(node)) is not None]
    if refused:
        alike = Counter((f"{n.op.name} in {n.origin}", _add_float_hint(reason, n, target)) for n, reason in refused)
        shown = "\n".join(
            f"  {where}{f', {count:,} nodes' * (count > 1)}: {reason}" for (where, reason), count in alike.items()
        )
        raise TargetError(f"{target.name} cannot run {format_count(len(refused), 'node')} of {graph.name}:\n{shown}")


def _add_float_hint(reason: str, node: Node, target: Target) -> str:
    """Return the reason, with a note whether a node would run in float if its operands are dequantized."""
    made = {v: v.producer for v in node.inputs if isinstance(v, Value) and v.producer is not None}
    if not any(producer.op_type == DEQUANTIZE_OPERATOR for producer in made.values()):
        return reason
    alone = Graph(node.name)
    stand_ins = {v: alone.add_input(v.type, v.name) for v in node.inputs if isinstance(v, Value)}
    operands = [stand_ins[v] if isinstance(v, Value) else v for v in node.inputs]
    twin = alone.insert(Node(node.op, operands, node.attrs, node.origin), [v.type for v in node.outputs])
    helps = "in float it would run: LayerQuantizationSettings(skip_quantization=True)"
    hint = helps if target.unsupported_reason(twin) is None else "it would not run in float either"
    return f"{reason.removesuffix('.')}; {hint}"
