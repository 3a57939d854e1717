"""A graph builder that executes each call eagerly, so that it only accepts legal calls."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from random import Random
from typing import Any, NamedTuple

import torch

from clika_ref.core.errors import PassError
from clika_ref.core.inference import infer_types
from clika_ref.core.ir import Graph, Node, Value
from clika_ref.core.operators import Operator
from clika_ref.core.samples import TensorSample, random_draw
from clika_ref.core.symbols import resolve
from clika_ref.core.types import TensorType
from clika_ref_conformance.cases import CaseRun, GraphCase
from clika_ref_conformance.drawing.eager_values import type_of
from clika_ref_conformance.drawing.sampling import draw_call_of_any_dtype
from clika_ref_conformance.eager_calls import call_eagerly, resolve_attrs
from clika_ref_conformance.judged_dtypes import is_judged

UNJUDGED_DTYPE = "of a dtype that is not judged"
"""Reason for rejecting a call with a tensor of such a dtype."""


@dataclass(frozen=True, slots=True)
class LeafTensor:
    """A tensor to add to the graph as an input, or as a constant if ``constant`` is set."""

    tensor: torch.Tensor
    constant: bool = False
    type: TensorType | None = None
    """Type of an input with dynamic dims."""
    name: str = ""


class CandidateCall(NamedTuple):
    """A call that eager accepts, before it is added to a graph."""

    node: Node
    """Its operands are types, numbers and None."""
    operands: Sequence[Any]
    results: tuple[torch.Tensor, ...]
    types: Sequence[TensorType]


class EagerGraphBuilder:
    """A graph under construction, with the tensor of each of its values on one set of inputs.

    Args:
        objection: returns the reason to leave a call out of the graph although eager accepts it, or None.

    """

    def __init__(self, objection: Callable[[CandidateCall], str | None] = lambda _: None) -> None:
        self.graph = Graph("drawn")
        self.rejection_reason = objection
        self.tensors: dict[Value, torch.Tensor] = {}
        self.sizes: dict[str, int] = {}
        self.rejected: list[tuple[Operator, str]] = []
        """Calls that were not added, with the reason for each."""

    def leaf(self, leaf: LeafTensor) -> Value:
        """Add an input or a constant."""
        if leaf.constant:
            floats = leaf.tensor.is_floating_point()
            data = torch.nn.Parameter(leaf.tensor.detach()) if floats else leaf.tensor
            value = self.graph.add_constant(data, leaf.name or f"layer{len(self.graph.constants)}.weight")
        else:
            value = self.graph.add_input(_operand_type(leaf), leaf.name or f"x{len(self.graph.inputs)}")
        self.tensors[value] = leaf.tensor.detach() if leaf.tensor.requires_grad else leaf.tensor
        return value

    def add_call(self, op: Operator, operands: Sequence[Any], attrs: Mapping[str, Any]) -> Node | None:
        """Add a call on values, leaves, numbers and None; return None and add nothing if it is illegal."""
        tensors = [self._operand_tensor(o) for o in operands]
        given = resolve_attrs(op, attrs, self.sizes)
        kinds = [_operand_type(o) for o in operands]
        try:
            results = tuple(call_eagerly(op, tensors, given))
            types = _infer_result_types(op, kinds, attrs, results, dynamic=bool(self.sizes))
            is_alien = not all(is_judged(r.dtype) for r in results)
        except Exception as error:  # noqa: BLE001 - a call is illegal if eager or inference rejects it
            return self.reject(op, str(error).partition("\n")[0])
        tried = CandidateCall(Node(op, kinds, dict(attrs)), tensors, results, types)
        problem = UNJUDGED_DTYPE if is_alien else self.rejection_reason(tried)
        if problem is not None:
            return self.reject(op, problem)
        leaves = {id(o): self.leaf(o) for o in {id(o): o for o in operands if isinstance(o, LeafTensor)}.values()}
        return self.add(Node(op, [leaves.get(id(o), o) for o in operands], dict(attrs)), types, results)

    def add(self, node: Node, types: Sequence[TensorType], results: Sequence[torch.Tensor]) -> Node:
        """Add a legal call with known results."""
        self.graph.insert(node, types)
        self.tensors.update(zip(node.outputs, results, strict=True))
        return node

    def add_copy(self, node: Node, mapping: dict[Value, Value], results: Sequence[torch.Tensor]) -> Node:
        """Add a copy of a node of another graph with its bodies; ``mapping`` is as of `Graph.insert_copy`."""
        twin = self.graph.insert_copy(node, mapping)
        self.tensors.update(zip(twin.outputs, results, strict=True))
        return twin

    def reject(self, op: Operator, problem: str) -> None:
        """Record that a call was not added."""
        self.rejected.append((op, problem))

    def finish(self, name: str, outputs: Sequence[Value] = ()) -> GraphCase:
        """Return the graph as a case.

        The graph returns ``outputs``, or all node results without a reader if ``outputs`` is empty.
        """
        unread = [v for node in self.graph.nodes for v in node.outputs if not v.uses]
        for value in outputs or unread:
            self.graph.add_output(value)
        return GraphCase(name, self.graph, [CaseRun("typical", tuple(self.tensors[v] for v in self.graph.inputs))])

    def _operand_tensor(self, operand: Any) -> Any:
        if isinstance(operand, LeafTensor):
            return operand.tensor
        return self.tensors[operand] if isinstance(operand, Value) else resolve(operand, self.sizes)


INFERENCE_PROBES = 4
"""Number of sampled calls that decide whether result shapes of an operator may depend on the data."""


@cache
def _is_always_inferable(op: Operator) -> bool:
    """Return whether types can be inferred for all sampled calls of an operator.

    This depends on the operator alone, so that every process draws the same calls. It is only called for operators
    without a type rule. A type rule may infer most calls and reject the few with data-dependent sizes, such as
    `one_hot` without a number of classes.
    """
    for seed in range(INFERENCE_PROBES):
        draw = random_draw(Random(seed))  # noqa: S311 - no secret
        full = draw_call_of_any_dtype(op, draw)
        kinds = [TensorType(o.dtype, o.shape) if isinstance(o, TensorSample) else o for o in full.operands]
        try:
            infer_types(op, kinds, full.attrs)
        except PassError:
            return False
    return True


def _infer_result_types(
    op: Operator, operands: Sequence[Any], attrs: Mapping[str, Any], results: Sequence[torch.Tensor], *, dynamic: bool
) -> Sequence[TensorType]:
    """Return the result types of a call.

    Without a type rule, inference takes longer than eager, so the types are read from the results if possible.
    """
    if dynamic or op.type_rule is not None or op.sampler is None or not _is_always_inferable(op):
        return infer_types(op, operands, attrs)
    return [type_of(r) for r in results]


def _operand_type(operand: Any) -> Any:
    """Return the type of an operand before it is computed; numbers are returned unchanged."""
    if isinstance(operand, LeafTensor):
        return operand.type or type_of(operand.tensor)
    return operand.type if isinstance(operand, Value) else operand
