"""Compute one node of a loop's body for all iterations at once, along a new dim 0."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from clika_ref.core.inference import Builder
from clika_ref.core.ir import Node, Value
from clika_ref.core.operators import Operator
from clika_ref.core.types import TensorType


@dataclass(frozen=True)
class IterationValues:
    """An operand for all iterations: ``item``, with one row for each along dim 0 if it ``varies``."""

    item: Any
    varies: bool


Rewritten: TypeAlias = "tuple[Sequence[Any], Mapping[str, Any]]"
"""The operands and attributes of a call for all iterations."""

Rewrite: TypeAlias = "Callable[[Builder, Node, Sequence[IterationValues], Any], Rewritten]"
"""Rewrites the operands and attributes of a node for all iterations, given their number."""


def is_vectorizable(node: Node, varies: Sequence[bool]) -> bool:
    """Whether `vectorize` supports a node, if these of its operands vary between the iterations."""
    if node.bodies or node.is_random:
        return False
    if is_pointwise(node.op):
        return len(node.outputs) == 1
    if node.op_type in FIRST_OPERAND_ONLY:
        return varies[0] and not any(varies[1:])
    if node.op_type == "embedding":
        return not varies[0]
    if node.op_type == "matmul":
        ranks = [v.type.rank for v in node.inputs]
        return min(ranks) >= 2 or (varies[0] and not varies[1] and (ranks[1] == 1 or (ranks[0] == 1 and ranks[1] == 2)))
    return node.op_type in RULES


def vectorize(build: Builder, node: Node, operands: Sequence[IterationValues], count: Any) -> Sequence[Value]:
    """Add the calls that compute a node for all iterations; return its results, with a row for each iteration.

    `is_vectorizable` must hold, and an operand must vary.
    """
    if is_pointwise(node.op):
        items, attrs = [align(build, batch, node.output.type.rank) for batch in operands], node.attrs
    elif node.op_type in RULES:
        items, attrs = RULES[node.op_type](build, node, operands, count)
    else:
        items, attrs = [batch.item for batch in operands], node.attrs
    types = [TensorType(v.type.dtype, (count, *v.type.shape)) for v in node.outputs]
    made = build(node.op, *items, types=types, **attrs)
    return made if isinstance(made, tuple) else (made,)


def is_pointwise(op: Operator) -> bool:
    """Whether an operator computes each element from those at the same index, after broadcasting."""
    return any(torch.Tag.pointwise in getattr(o, "tags", ()) for o in op.converters)


def align(build: Builder, batch: IterationValues, rank: int) -> Any:
    """Return an operand whose rows broadcast to results of the given rank."""
    if not batch.varies or not isinstance(batch.item, Value):
        return batch.item
    size, *shape = batch.item.type.shape
    if len(shape) >= rank:
        return batch.item
    aligned = (size, *[1] * (rank - len(shape)), *shape)
    return build("reshape", batch.item, shape=aligned, types=[TensorType(batch.item.type.dtype, aligned)])


def repeat(build: Builder, batch: IterationValues, count: Any) -> Value:
    """Return an operand with a row for each iteration."""
    if batch.varies:
        return batch.item
    size = (count, *batch.item.type.shape)
    return build("expand", batch.item, size=size, types=[TensorType(batch.item.type.dtype, size)])


FIRST_OPERAND_ONLY = ("linear", "layer_norm", "to", "detach")
"""Operators that treat all leading dims of the first operand alike; the others are the same in all iterations."""


def _rewrite_matmul(build: Builder, node: Node, operands: Sequence[IterationValues], _count: Any) -> Rewritten:
    ranks = [v.type.rank for v in node.inputs]
    rank = max(ranks) if min(ranks) >= 2 else 0
    return [align(build, batch, rank) for batch in operands], {}


def _move_dim(_build: Builder, node: Node, operands: Sequence[IterationValues], _count: Any) -> Rewritten:
    """Rewrite an operator with one dim of its operand as an attribute."""
    dim = node.attrs["dim"] % max(node.inputs[0].type.rank, 1) + 1
    return [operands[0].item], {**node.attrs, "dim": dim}


def _move_dims(_build: Builder, node: Node, operands: Sequence[IterationValues], _count: Any) -> Rewritten:
    """Rewrite an operator with several dims of its operand as an attribute; none or () are all."""
    name, rank = "dims" if "dims" in node.attrs else "dim", node.inputs[0].type.rank
    dims = node.attrs[name] if node.attrs[name] or name == "dims" else range(rank)
    return [operands[0].item], {**node.attrs, name: tuple(d % max(rank, 1) + 1 for d in dims)}


def _move_new_dim(_build: Builder, node: Node, operands: Sequence[IterationValues], _count: Any) -> Rewritten:
    return [operands[0].item], {"dim": node.attrs["dim"] % (node.inputs[0].type.rank + 1) + 1}


def _rewrite_permute(_build: Builder, node: Node, operands: Sequence[IterationValues], _count: Any) -> Rewritten:
    rank = node.inputs[0].type.rank
    return [operands[0].item], {"dims": (0, *(d % rank + 1 for d in node.attrs["dims"]))}


def _rewrite_reshape(_build: Builder, node: Node, operands: Sequence[IterationValues], count: Any) -> Rewritten:
    return [operands[0].item], {"shape": (count, *node.output.type.shape)}


def _rewrite_expand(build: Builder, node: Node, operands: Sequence[IterationValues], count: Any) -> Rewritten:
    return [align(build, operands[0], node.output.type.rank)], {"size": (count, *node.output.type.shape)}


def _rewrite_join(build: Builder, node: Node, operands: Sequence[IterationValues], count: Any) -> Rewritten:
    dim = node.attrs["dim"] % node.output.type.rank + 1
    return [repeat(build, batch, count) for batch in operands], {"dim": dim}


RULES: Mapping[str, Rewrite] = {
    "matmul": _rewrite_matmul,
    **dict.fromkeys(("softmax", "log_softmax", "cumsum", "select", "slice", "split_with_sizes"), _move_dim),
    **dict.fromkeys(("unbind",), _move_dim),
    **dict.fromkeys(("sum", "mean", "amax", "amin", "squeeze", "flip"), _move_dims),
    "unsqueeze": _move_new_dim,
    "permute": _rewrite_permute,
    "reshape": _rewrite_reshape,
    "expand": _rewrite_expand,
    "stack": _rewrite_join,
    "cat": _rewrite_join,
}
"""How to compute further operators for all iterations."""
