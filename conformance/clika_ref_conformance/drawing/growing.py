"""A graph in the making that is computed as it grows, so that every call that it takes is a legal one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from random import Random
from typing import Any, NamedTuple

import torch

from clika_ref.core.errors import PassError
from clika_ref.core.inference import infer
from clika_ref.core.ir import Graph, Node, Value
from clika_ref.core.operators import Operator
from clika_ref.core.samples import TensorSample, random_draw
from clika_ref.core.symbols import resolve
from clika_ref.core.types import TensorType
from clika_ref_conformance.cases import Case, Run
from clika_ref_conformance.drawing.eager_values import type_of
from clika_ref_conformance.drawing.sampling import described
from clika_ref_conformance.judged_dtypes import is_judged

NOT_JUDGED = "of a dtype that is not judged"
"""Why a call is not taken of which a tensor has such a dtype."""


@dataclass(frozen=True, slots=True)
class Leaf:
    """A tensor that becomes an input of the graph, or a constant where ``constant`` holds."""

    tensor: torch.Tensor
    constant: bool = False
    type: TensorType | None = None
    """The type of an input with dynamic sides."""
    name: str = ""


class Tried(NamedTuple):
    """A call that eager takes, before it is part of a graph."""

    node: Node
    """It reads types, numbers and None."""
    operands: Sequence[Any]
    results: tuple[torch.Tensor, ...]
    types: Sequence[TensorType]


class Growth:
    """A graph, and the tensor that each of its values holds on one set of inputs.

    Args:
        objection: says why a call that eager takes shall not be part of the graph, or returns None.

    """

    def __init__(self, objection: Callable[[Tried], str | None] = lambda _: None) -> None:
        self.graph = Graph("drawn")
        self.objection = objection
        self.tensors: dict[Value, torch.Tensor] = {}
        self.sizes: dict[str, int] = {}
        self.rejected: list[tuple[Operator, str]] = []
        """Calls that were not taken, and why."""

    def leaf(self, leaf: Leaf) -> Value:
        """Add an input or a constant."""
        if leaf.constant:
            floats = leaf.tensor.is_floating_point()
            data = torch.nn.Parameter(leaf.tensor.detach()) if floats else leaf.tensor
            value = self.graph.add_constant(data, leaf.name or f"layer{len(self.graph.constants)}.weight")
        else:
            value = self.graph.add_input(_type(leaf), leaf.name or f"x{len(self.graph.inputs)}")
        self.tensors[value] = leaf.tensor.detach() if leaf.tensor.requires_grad else leaf.tensor
        return value

    def place(self, op: Operator, operands: Sequence[Any], attrs: Mapping[str, Any]) -> Node | None:
        """Add a call on values, leaves, numbers and None; return None, and add nothing, where it is not legal."""
        tensors = [self._tensor(o) for o in operands]
        given = resolve_attrs(op, attrs, self.sizes)
        kinds = [_type(o) for o in operands]
        try:
            with torch.no_grad():
                result = op(*tensors, **given)
            results = (result,) if isinstance(result, torch.Tensor) else tuple(result)
            types = _types(op, kinds, attrs, results, dynamic=bool(self.sizes))
            is_alien = not all(is_judged(r.dtype) for r in results)
        except Exception as error:  # noqa: BLE001 - whatever eager or inference refuses is no legal call
            return self.reject(op, str(error).partition("\n")[0])
        tried = Tried(Node(op, kinds, dict(attrs)), tensors, results, types)
        problem = NOT_JUDGED if is_alien else self.objection(tried)
        if problem is not None:
            return self.reject(op, problem)
        leaves = {id(o): self.leaf(o) for o in {id(o): o for o in operands if isinstance(o, Leaf)}.values()}
        return self.add(Node(op, [leaves.get(id(o), o) for o in operands], dict(attrs)), types, results)

    def add(self, node: Node, types: Sequence[TensorType], results: Sequence[torch.Tensor]) -> Node:
        """Add a legal call of which the results are known."""
        self.graph.insert(node, types)
        self.tensors.update(zip(node.outputs, results, strict=True))
        return node

    def reject(self, op: Operator, problem: str) -> None:
        """Note that a call was not taken."""
        self.rejected.append((op, problem))

    def finish(self, name: str, outputs: Sequence[Value] = ()) -> Case:
        """Return the case: the graph returns ``outputs``, or every value that a node makes and nobody reads."""
        unread = [v for node in self.graph.nodes for v in node.outputs if not v.uses]
        for value in outputs or unread:
            self.graph.add_output(value)
        return Case(name, self.graph, [Run("typical", tuple(self.tensors[v] for v in self.graph.inputs))])

    def _tensor(self, operand: Any) -> Any:
        if isinstance(operand, Leaf):
            return operand.tensor
        return self.tensors[operand] if isinstance(operand, Value) else resolve(operand, self.sizes)


SAMPLED = 4
"""Sampled calls by which it is found whether the sizes of an operator's results may depend on elements."""


@cache
def _is_always_inferable(op: Operator) -> bool:
    """Whether types can be inferred of sampled calls: a fact of the operator, so that every process draws alike.

    Of an operator with a type rule it is not asked: it may infer most calls and refuse the few whose sizes depend on
    elements, as `one_hot` without a number of classes.
    """
    for seed in range(SAMPLED):
        draw = random_draw(Random(seed))  # noqa: S311 - no secret
        full = described(op, draw)
        kinds = [TensorType(o.dtype, o.shape) if isinstance(o, TensorSample) else o for o in full.operands]
        try:
            infer(op, kinds, full.attrs)
        except PassError:
            return False
    return True


def _types(
    op: Operator, operands: Sequence[Any], attrs: Mapping[str, Any], results: Sequence[torch.Tensor], *, dynamic: bool
) -> Sequence[TensorType]:
    """Infer the types of a call, or read them off: without a type rule, inference takes longer than eager."""
    if dynamic or op.type_rule is not None or op.sampler is None or not _is_always_inferable(op):
        return infer(op, operands, attrs)
    return [type_of(r) for r in results]


def resolve_attrs(op: Operator, attrs: Mapping[str, Any], sizes: Mapping[str, int]) -> dict[str, Any]:
    """Return attributes as eager takes them: sizes as numbers, and a device where the operator needs one."""
    given = {name: resolve(value, sizes) for name, value in attrs.items()}
    if op.takes_device and given["device"] is None:
        given["device"] = torch.device("cpu")
    return given


def _type(operand: Any) -> Any:
    """Return what is known of an operand before it is computed; a number is what it is."""
    if isinstance(operand, Leaf):
        return operand.type or type_of(operand.tensor)
    return operand.type if isinstance(operand, Value) else operand
