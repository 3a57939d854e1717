"""Compute only the rows of a linear layer that are read: move a slice of its result to its input."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch

from clika_ref.core.accuracy import DOT
from clika_ref.core.inference import Builder
from clika_ref.core.ir import Node, Value
from clika_ref.core.rewriter import Skip, rule
from clika_ref.core.types import TensorType
from clika_ref_cleanup.cleanup_pass import RulePass, keep_name


@rule("slice")
def slice_before_linear(node: Node, build: Builder):
    """``linear(x)[:, start:end]`` is ``linear(x[:, start:end])``, also with reshapes and permutes between them."""
    moves: list[tuple[Node, int]] = []
    value, dim = node.inputs[0], node.attrs["dim"] % node.output.type.rank
    length = node.output.type.shape[dim]
    while True:
        maker = value.producer
        if maker is None or len(value.uses) > 1:
            return Skip("it cuts no result that it alone reads", len(moves))
        if maker.op_type == "linear":
            break
        source = _find_source_dim(maker, dim)
        if source is None:
            return Skip("another operator comes before it, or its dim is split", len(moves))
        moves.append((maker, dim))
        value, dim = maker.inputs[0], source
    if dim == value.type.rank - 1:
        return Skip("it cuts the features of a layer", len(moves))
    x, *weights = maker.inputs
    build.origin = maker.origin.with_rule("slice-before-linear")  # the user knows it by the name of the layer
    cut = build(node.op, x, types=_cut_types(x, dim, length), **{**node.attrs, "dim": dim})
    result = keep_name(build.graph, value, build("linear", cut, *weights, types=_cut_types(value, dim, length)))
    for move, at in reversed(moves):
        build.origin, types = move.origin, _cut_types(move.output, at, length)
        shape = {"shape": types[0].shape} if move.op_type == "reshape" else {}
        result = build(move.op, result, types=types, **{**move.attrs, **shape})
    return keep_name(build.graph, node.output, result)


def _cut_types(value: Value, dim: int, length: Any) -> tuple[TensorType]:
    """Return the type of a value with another size of one dim, as a node declares it."""
    shape = value.type.shape
    return (TensorType(value.type.dtype, (*shape[:dim], length, *shape[dim + 1 :])),)


def _find_source_dim(node: Node, dim: int) -> int | None:
    """Return the dim of the operand that becomes ``dim`` of the result, row by row; None if there is none."""
    if node.op_type == "permute":
        return node.attrs["dims"][dim] % node.output.type.rank
    if node.op_type != "reshape":
        return None
    before, after = node.inputs[0].type.shape, node.output.type.shape
    return dim if before[: dim + 1] == after[: dim + 1] else None


def last_rows_of_heads(build: Builder) -> Value:
    """``linear(x).reshape(n, 5, 2, 3).transpose(1, 2)[:, :, 2:]``: the keys of the last positions."""
    x = build.graph.add_input(TensorType(torch.float32, (3, 5, 4)), "x")
    weight = build.constant(torch.arange(24.0).reshape(6, 4) / 8 - 1, "weight")
    heads = build("reshape", build("linear", x, weight, None), shape=(3, 5, 2, 3))
    return build("slice", build("permute", heads, dims=(0, 2, 1, 3)), dim=2, start=2, end=5, step=1)


class PushSlices(RulePass):
    """Move slices of rows before linear layers, so that only the rows that are read are computed.

    The keys of an encoder are computed in the first call of a decoder only: in the following ones, no row is missing.
    """

    name = "push-slices"
    rules = (slice_before_linear,)
    motifs: ClassVar[tuple[Callable[[Builder], Value], ...]] = (last_rows_of_heads,)
    after = ("merge-chains",)
    error = DOT
    removes = "row of a linear layer"
