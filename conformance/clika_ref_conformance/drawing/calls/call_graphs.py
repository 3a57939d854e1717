"""Conversion of a drawn call to a graph of one node."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from clika_ref.core.errors import ClikaError, PassError
from clika_ref.core.inference import infer_types
from clika_ref.core.ir import Graph, Node
from clika_ref.core.operators import Operator
from clika_ref.core.symbols import make_symbol
from clika_ref.core.types import TensorType
from clika_ref_conformance.eager_calls import call_eagerly

MAX_RESULT_DIM = 10_000
"""Maximum size of a result dim; larger ones waste memory."""


def build_call_graph(op: Operator, operands: Sequence[Any], attrs: dict[str, Any]) -> Graph:
    """Return a graph of one call, with an input ``x0``, ``x1``, ... for each tensor operand."""
    graph = Graph(op.name)
    inputs = _add_inputs(graph, operands)
    types = infer_result_types(op, inputs, attrs, lambda: call_eagerly(op, operands, attrs))
    node = graph.insert(Node(op, inputs, attrs), types)
    for value in node.outputs:
        graph.add_output(value)
    return graph


def has_huge_result(op: Operator, operands: Sequence[Any], attrs: dict[str, Any]) -> bool:
    """Return whether a result of a call has a dim longer than `MAX_RESULT_DIM`, as far as type inference shows."""
    try:
        types = infer_types(op, _add_inputs(Graph(op.name), operands), attrs)
    except ClikaError:
        return False
    return any(isinstance(size, int) and size > MAX_RESULT_DIM for t in types for size in t.shape)


def _add_inputs(graph: Graph, operands: Sequence[Any]) -> list[Any]:
    """Add a graph input for each tensor; return the operands with these inputs in place of the tensors."""
    return [
        graph.add_input(TensorType(o.dtype, tuple(o.shape)), f"x{len(graph.inputs)}")
        if isinstance(o, torch.Tensor)
        else o
        for o in operands
    ]


def infer_result_types(
    op: Operator, inputs: Sequence[Any], attrs: Mapping[str, Any], call: Callable[[], Sequence[torch.Tensor]]
) -> tuple[TensorType, ...]:
    """Return the inferred types of the outputs.

    If sizes depend on the data, all dims of the results of ``call`` become symbols, as a lowering must not know them.
    """
    try:
        return infer_types(op, inputs, attrs)
    except PassError as error:
        if "depends on the data" not in str(error):
            raise
    return tuple(
        TensorType(r.dtype, tuple(make_symbol(f"u{i}_{d}") for d in range(r.ndim))) for i, r in enumerate(call())
    )
