"""Lower the graph of a module for an export: quantized or in float, with the selected outputs and number format."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from clika_ref.compiled.lowering import quantize_for_target
from clika_ref.core.ir import Graph
from clika_ref.core.operators import Operator
from clika_ref.core.registry import Registry
from clika_ref.core.targets import Target
from clika_ref.export.configuration import ExportConfiguration
from clika_ref.export.fp16 import convert_to_half
from clika_ref.quantization.qdq.insertion import Plan
from clika_ref.quantization.qdq.packed_weights import set_int4_storage


def make_export_graph(
    graph: Graph, plan: Plan | None, target: Target, registry: Registry, form: ExportConfiguration
) -> Graph:
    """Return a clone of a module's graph as lowered for a target, without the names and dims that an export chooses.

    Raises:
        ModelError: the form names an output that does not exist, or requires INT4 weights and there are none.
        TargetError: the form excludes INT4, and the target supports no other format for these weights.
    """
    clone = quantize_for_target(graph, plan, target, registry, form.select_outputs(graph.outputs))
    apply_form(clone, target, form, registry.operators)
    return clone


def make_float_graph(graph: Graph, target: Target, registry: Registry, form: ExportConfiguration) -> Graph:
    """Return the same as `make_export_graph` without quantization, to compare times with.

    Raises:
        ModelError: the form names an output that does not exist.
    """
    return make_export_graph(graph, None, target, registry, replace(form, export_int4=None))


def apply_form(graph: Graph, target: Target, form: ExportConfiguration, operators: Mapping[str, Operator]) -> None:
    """Pack the INT4 weights of a quantized graph, and convert it to FP16 or BF16 if requested."""
    set_int4_storage(graph, target, as_such=form.export_int4)
    if form.half is not None:
        convert_to_half(graph, form.half, operators)
    graph.drop_unused_constants()
