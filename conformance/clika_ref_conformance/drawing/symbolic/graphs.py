"""Conversion of static graphs to graphs with one dynamic size, with inputs of several lengths."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from random import Random
from typing import Any

import torch

from clika_ref.core.errors import ClikaError
from clika_ref.core.execution import interpret
from clika_ref.core.inference import infer_types
from clika_ref.core.ir import Graph, Node, Value
from clika_ref.core.operators import Operator
from clika_ref.core.samples import TensorDescription, random_draw
from clika_ref.core.symbols import Symbol, SymbolSource, make_symbol
from clika_ref.core.types import TensorType
from clika_ref_conformance.cases import CaseRun, GraphCase
from clika_ref_conformance.drawing.sampling import CRASHING_OPERATORS, draw_call_of_any_dtype

BATCH = make_symbol("batch")

BATCH_LENGTHS = (9, 1, 7, 0)
"""Lengths to try in addition to the drawn one: a larger one, 1, a coprime one and 0."""

MIN_NODES = 2

UNIQUENESS_PROBES = 8
"""Number of drawn calls that decide whether an operator's samples ask for unique elements."""


def make_dim_dynamic(case: GraphCase) -> GraphCase | None:
    """Return a case where all input dims of one size become a symbol, with runs at several sizes.

    Nodes without inferable types are left out, together with the nodes that depend on them. None if no size leaves a
    graph that eager runs at another size.
    """
    best: GraphCase | None = None
    sides = {side for value in case.graph.inputs for side in value.type.shape if isinstance(side, int)}
    for length in sorted((side for side in sides if side > 1), reverse=True):
        graph = _make_symbolic(case.graph, length)
        if graph is None or (best is not None and len(graph) <= len(best.graph)):
            continue
        runs = list(_make_runs(graph, case.runs[0]))
        if len(runs) > 1:
            runs += [CaseRun(f"{run.name} again", run.inputs) for run in (runs[-1], runs[0])]
            best = GraphCase(f"{case.name}, dynamic", graph, runs, {**case.facts, "batch": length})
    return best


def _make_symbolic(whole: Graph, length: int) -> Graph | None:
    graph = Graph(whole.name)
    values: dict[Value, Value] = {}
    for value in whole.inputs:
        shape = tuple(BATCH if size == length else size for size in value.type.shape)
        values[value] = graph.add_input(TensorType(value.type.dtype, shape), value.name)
        if BATCH in shape and not graph.symbols:
            graph.symbols[BATCH.name] = Symbol(BATCH.name, 0, None, SymbolSource(value.name, shape.index(BATCH)))
    for name, value in whole.constants.items():
        if value.data is not None:
            values[value] = graph.add_constant(value.data, name)
    for node in whole.nodes:
        _copy_node(node, graph, values)
    if len(graph) < MIN_NODES:
        return None
    for node in list(graph.nodes):
        for value in node.outputs:
            if not value.uses:
                graph.add_output(value)
    return graph


def _copy_node(node: Node, graph: Graph, values: dict[Value, Value]) -> None:
    if node.op.name in CRASHING_OPERATORS or any(isinstance(v, Value) and v not in values for v in node.inputs):
        return
    inputs: list[Any] = [values[v] if isinstance(v, Value) else v for v in node.inputs]
    try:
        types = infer_types(node.op, inputs, node.attrs)
    except ClikaError:
        return
    twin = graph.insert(Node(node.op, inputs, node.attrs), types)
    values.update(zip(node.outputs, twin.outputs, strict=True))


def _make_runs(graph: Graph, first: CaseRun) -> Iterator[CaseRun]:
    """Yield inputs of each length that eager accepts, and empty ones only after at least two other lengths.

    With empty tensors, eager accepts inconsistent operands, such as keys and values of different lengths.
    """
    run_count = 0
    for length in (None, *BATCH_LENGTHS):
        if not length and length is not None and run_count <= 1:
            return
        inputs = tuple(_resize_dynamic_dims(t, v, length) for t, v in zip(first.inputs, graph.inputs, strict=True))
        try:
            with torch.no_grad():
                outputs, _ = interpret(graph, inputs)
        except ClikaError:
            continue
        run_count += 1
        if length is not None and any(t.isnan().any() for t in outputs):  # such as the variance of one element
            continue
        yield CaseRun("as drawn" if length is None else f"batch {length}", inputs)


def _resize_dynamic_dims(tensor: torch.Tensor, value: Value, length: int | None) -> torch.Tensor:
    """Return a tensor with its dynamic dims cut, or extended by repetition, to another length.

    Repeated elements are shifted if a reader has no unique result for equal elements.
    """
    is_compared = any(isinstance(use.user, Node) and _has_unique_elements(use.user.op) for use in value.uses)
    for dim, size in enumerate(value.type.shape):
        if size == BATCH and length is not None:
            positions = torch.arange(length)
            turns = (positions // tensor.shape[dim]).reshape(-1, *[1] * (tensor.ndim - dim - 1))
            shifts = is_compared and tensor.numel() and tensor.dtype is not torch.bool
            span = tensor.max() - tensor.min() + 1 if shifts else None
            tensor = tensor.index_select(dim, positions % tensor.shape[dim])
            tensor = tensor if span is None else tensor + (turns * span).to(tensor.dtype)
    return tensor


@cache
def _has_unique_elements(op: Operator) -> bool:
    """Return whether an operator's samples ask for pairwise different elements."""
    seen: list[bool] = []
    decide = random_draw(Random(op.name))  # noqa: S311 - draws tests, not keys

    def draw(description: Any) -> Any:
        seen.append(isinstance(description, TensorDescription) and description.unique)
        return decide(description)

    for _ in range(UNIQUENESS_PROBES if op.sampler is not None else 0):
        draw_call_of_any_dtype(op, draw)
    return any(seen)
