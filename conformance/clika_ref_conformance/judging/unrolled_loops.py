"""Loops as the nodes of all their iterations, so that each call of a body gets the bound of its error class."""

from __future__ import annotations

import torch
from torch import Tensor

from clika_ref.core.accuracy import EXACT
from clika_ref.core.inference import Builder
from clika_ref.core.ir import Graph, Node, Value
from clika_ref.core.operators import operator


@operator(error=EXACT)
def conformance_row(x: Tensor, *, index: int) -> Tensor:
    """``x[index]``."""
    return x[index].clone()


@operator(error=EXACT)
def conformance_rows(*rows: Tensor) -> Tensor:
    """The rows stacked along a new dim 0."""
    return torch.stack(rows)


def unroll_loops(graph: Graph) -> Graph:
    """Return a graph in which each ``scan`` is replaced by its iterations, or the same graph if it has none.

    Raises:
        ValueError: a body of another operator, or a loop without rows.
    """
    if not any(node.bodies for node in graph.nodes):
        return graph
    copy = Graph(graph.name)
    mapping = {v: copy.add_input(v.type, v.name) for v in graph.inputs}
    for value in graph.constants.values():
        assert value.data is not None
        mapping[value] = copy.add_constant(value.data, value.name)
    for node in graph.nodes:
        if node.bodies:
            _add_iterations(copy, node, mapping)
        else:
            copy.insert_copy(node, mapping)
    for value in graph.outputs:
        copy.add_output(mapping[value])
    return copy


def _add_iterations(graph: Graph, node: Node, mapping: dict[Value, Value]) -> None:
    """Add the calls of all iterations; ``mapping`` gets the results of the loop."""
    if node.op_type != "scan":
        raise ValueError(f"the suite judges loops, not the bodies of {node.op_type}")
    (body,), build = node.bodies, Builder(graph, {})
    carried, end = node.attrs["carried"], node.attrs["carried"] + node.attrs["scanned"]
    operands = [mapping[v] for v in node.inputs]
    states, rows, others = operands[:carried], operands[carried:end], operands[end:]
    count = rows[0].type.shape[0]
    if not isinstance(count, int) or not count:
        raise ValueError(f"the suite judges loops with a fixed number of rows, at least one, not {count}")
    results: list[list[Value]] = []
    for index in range(count):
        row = [build(conformance_row, x, index=index) for x in rows]
        inner = mapping | dict(zip(body.inputs, (*states, *row, *others), strict=True))
        for call in body.nodes:
            graph.insert_copy(call, inner)
        states = [inner[v] for v in body.outputs[:carried]]
        results.append([inner[v] for v in body.outputs[carried:]])
    stacked = [build(conformance_rows, *column) for column in zip(*results, strict=True)]
    mapping.update(zip(node.outputs, (*states, *stacked), strict=True))
