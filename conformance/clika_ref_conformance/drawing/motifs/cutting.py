"""Reduction of motifs: remove a node, so that its results become inputs, or an output with its exclusive nodes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch

from clika_ref.core.ir import Graph, Node, Use, Value
from clika_ref_conformance.cases import CaseRun, GraphCase


def shrink_motif(case: GraphCase, is_kept: Callable[[GraphCase], bool]) -> GraphCase:
    """Remove nodes and outputs from a case while ``is_kept`` holds; results of a removed node become inputs."""
    while (smaller := next(filter(is_kept, _make_smaller_cases(case)), None)) is not None:
        case = smaller
    return case


def _make_smaller_cases(case: GraphCase) -> Iterator[GraphCase]:
    if len(case.graph.outputs) > 1:
        yield from (cut_case(case, None, drop=position) for position in range(len(case.graph.outputs)))
    if len(case.graph) > 1:
        yield from (cut_case(case, position) for position in range(len(case.graph)))


def cut_case(case: GraphCase, position: int | None, drop: int | None = None) -> GraphCase:
    """Return a case without the node at a position, so that its results become inputs, and without one output."""
    (run, *_) = case.runs
    graph = case.graph.clone()
    nodes = list(graph.nodes)
    inputs = list(run.inputs)
    gone = None if position is None else nodes[position]
    if position is not None:
        for value, old in zip(nodes[position].outputs, list(case.graph.nodes)[position].outputs, strict=True):
            if any(isinstance(use.user, Node) for use in value.uses):
                graph.replace(value, graph.add_input(value.type, f"cut_{value.name}"))
                inputs.append(case.tensors[old])
    return _copy_needed(case.name, graph, inputs, gone, drop)


def _copy_needed(
    name: str, graph: Graph, tensors: Sequence[torch.Tensor], gone: Node | None, drop: int | None
) -> GraphCase:
    """Copy the needed part of a graph without a node and an output.

    If no computed output is left, all unread results become outputs.
    """
    left = Graph(graph.name)
    tensor_by_input = dict(zip(graph.inputs, tensors, strict=True))
    mapping: dict[Value, Value] = {}
    feeds: list[torch.Tensor] = []
    idle = set[Node]() if drop is None else _find_exclusive_nodes(graph, drop)
    nodes = [n for n in graph.nodes if n is not gone and n not in idle]
    read = {v for n in nodes for v in n.inputs if isinstance(v, Value)}
    for value in graph.inputs:
        if value in read:
            mapping[value] = left.add_input(value.type, value.name)
            feeds.append(tensor_by_input[value])
    for value in graph.constants.values():
        if value in read and value.data is not None:
            mapping[value] = left.add_constant(value.data, value.name)
    for node in nodes:
        left.insert_copy(node, mapping)
    for position, value in enumerate(graph.outputs):
        if position != drop and value in mapping and value.producer is not None and value.producer is not gone:
            left.add_output(mapping[value])
    for value in gone.inputs if gone else ():  # unread values would be dead code, which is not compared
        if isinstance(value, Value) and value.producer is not None and not mapping[value].uses:
            left.add_output(mapping[value])
    if not left.outputs:
        for value in [v for n in left.nodes for v in n.outputs if not v.uses]:
            left.add_output(value)
    return GraphCase(name, left, [CaseRun("typical", tuple(feeds))])


def _find_exclusive_nodes(graph: Graph, output: int) -> set[Node]:
    """Return the nodes that only one output needs.

    They are removed with it, so that a pass does not fire on nodes without a visible effect.
    """
    found: set[Node] = set()
    for node in reversed(list(graph.nodes)):
        uses = [use for v in node.outputs for use in v.uses]
        if uses and all(use.user in found or use == Use(graph, output) for use in uses):
            found.add(node)
    return found
