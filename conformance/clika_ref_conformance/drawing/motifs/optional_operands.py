"""Near misses that omit an operand of a call, or add an optional one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from clika_ref.core.ir import Node, Value
from clika_ref_conformance.cases import GraphCase
from clika_ref_conformance.drawing.eager_builder import LeafTensor
from clika_ref_conformance.drawing.motifs.call_generator import UNSAFE_OPERATORS
from clika_ref_conformance.drawing.motifs.near_misses import Operators
from clika_ref_conformance.drawing.motifs.rebuilding import CaseRebuilder


def change_optional_operands(case: GraphCase, _: Operators) -> Iterator[GraphCase | None]:
    """Omit each operand, and add a constant for each missing one, where eager accepts the call."""
    for position, node in enumerate(case.graph.nodes):
        for index, item in enumerate(node.inputs) if node.op_type not in UNSAFE_OPERATORS else ():
            name = f"{node.op_type} {position}: operand {index}"
            if isinstance(item, Value):
                yield _replace_operand(case, node, index, None, f"{name} omitted")
            elif item is None:
                fitting = (
                    _replace_operand(case, node, index, leaf, f"{name} added")
                    for leaf in _make_constant_candidates(node)
                )
                yield next(filter(None, fitting), None)


def _make_constant_candidates(node: Node) -> Iterator[LeafTensor]:
    """Yield constants with the lengths of the dims of the result and operands, to fit along one of them."""
    values = [*node.outputs, *(v for v in node.inputs if isinstance(v, Value))]
    lengths = dict.fromkeys(int(size) for v in values for size in v.type.shape if isinstance(size, int))
    dtype = node.outputs[0].type.dtype
    yield from (LeafTensor((torch.arange(n) % 5 - 1).to(dtype), constant=True, name="given") for n in lengths)


def _replace_operand(
    case: GraphCase, node: Node, index: int, operand: LeafTensor | None, name: str
) -> GraphCase | None:
    new = CaseRebuilder.with_leaves(case)
    inputs: list[Any] = list(node.inputs)
    inputs[index] = None if operand is None else new.builder.leaf(operand)
    legal = all(new.take(n, inputs) if n is node else new.take(n) for n in case.graph.nodes)
    return new.finish(name, new.unread) if legal else None
