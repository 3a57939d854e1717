"""Merge consecutive reshapes, permutes, expands and casts."""

from __future__ import annotations

import torch

from clika_ref.core.inference import Builder
from clika_ref.core.ir import Node, Value
from clika_ref.core.rewriter import Skip, rule
from clika_ref.core.types import TensorType
from clika_ref_cleanup.cleanup_pass import RulePass

RESHAPE_OPERATORS = ("reshape", "view", "flatten", "unflatten", "squeeze", "unsqueeze")
"""Operators that keep all elements in order, equivalent to a ``reshape`` to the shape of their result."""

INTEGER_BITS = {torch.bool: (0, 1), torch.uint8: (0, 8), torch.int8: (1, 7), torch.int16: (1, 15), torch.int32: (1, 31)}
INTEGER_BITS[torch.int64] = (1, 63)
"""Number of sign bits and of value bits of each integer dtype."""

FLOAT_BITS = {torch.float16: (5, 11), torch.bfloat16: (8, 8), torch.float32: (8, 24), torch.float64: (11, 53)}
"""Bits of exponent and of precision. Source: IEEE 754-2019, table 3.5; bfloat16 is float32 truncated to 16 bits."""


@rule(*RESHAPE_OPERATORS)
def merge_reshapes(node: Node, build: Builder):
    """``reshape(reshape(x))`` is one reshape, or ``x`` if the shape is that of ``x``."""
    match node.inputs[0]:
        case Value(producer=Node(op_type=kind, inputs=(Value() as x, *_))) if kind in RESHAPE_OPERATORS:
            views = {node.op_type, kind} <= {"squeeze", "unsqueeze"}
            if views and x.type != node.output.type and _count_dynamic_dims(node.output) > 1:
                return Skip("two dims are dynamic: computing the shape costs more than the second view", 1)
            return _reshape(build, x, node.output)
    return Skip("its operand is not a reshape")


@rule("permute")
def merge_permutes(node: Node, build: Builder):
    """``permute(permute(x))`` is one permutation, or ``x`` if they are inverse to each other."""
    match node.inputs[0]:
        case Value(producer=Node("permute", (Value() as x,), {"dims": first})):
            rank = len(first)
            dims = tuple(first[d] % rank for d in node.attrs["dims"])
            return x if dims == tuple(range(rank)) else build("permute", x, dims=dims, types=(node.output.type,))
    return Skip("its operand is not a permute")


@rule("permute")
def reshape_instead_of_permute(node: Node, build: Builder):
    """A permutation that only moves dims of size 1 keeps the order of elements: it is a reshape."""
    (x,) = node.inputs
    shape, dims = x.type.shape, [d % len(x.type.shape) for d in node.attrs["dims"]]
    long = [d for d in dims if shape[d] != 1]
    if long != sorted(long):
        return Skip("moves a dim of a size above 1")
    if _count_dynamic_dims(x) > 1:
        return Skip("two dims are dynamic: computing the shape costs more than the permute", 1)
    return _reshape(build, x, node.output)


@rule("squeeze")
def squeeze_before_permute(node: Node, build: Builder):
    """``squeeze(permute(reshape(x)))`` is ``permute(reshape(x))``: the reshape need not add the squeezed dims."""
    match node.inputs[0]:
        case Value(producer=Node("permute", (Value(producer=Node() as first) as middle,), {"dims": dims})) as moved:
            pass
        case _:
            return Skip("its operand is not a permute")
    if first.op_type not in RESHAPE_OPERATORS or len(moved.uses) != 1:
        return Skip("the permute follows no reshape, or is read elsewhere", 1)
    shape, rank = middle.type.shape, len(dims)
    dropped = {dims[d] % rank for d in node.attrs["dims"] if moved.type.shape[d] == 1}
    kept = [d for d in range(rank) if d not in dropped]
    smaller = TensorType(middle.type.dtype, tuple(shape[d] for d in kept))
    x = first.inputs[0]
    if x.type != smaller:
        if first.op_type != "reshape" and _count_dynamic_dims(middle) > 1:
            return Skip("two dims are dynamic: computing the shape costs more than the views", 2)
        x = build("reshape", x, shape=smaller.shape, types=(smaller,))
    order = tuple(kept.index(d % rank) for d in dims if d % rank not in dropped)
    return build("permute", x, dims=order, types=(node.output.type,))


@rule("expand")
def merge_expands(node: Node, build: Builder):
    """``expand(expand(x))`` is one expand."""
    match node.inputs[0]:
        case Value(producer=Node("expand", (Value() as x, *_))):
            return build("expand", x, size=node.output.type.shape, types=(node.output.type,))
    return Skip("its operand is not an expand")


@rule("to")
def merge_casts(node: Node, build: Builder):
    """``to(to(x, wider), dtype)`` is ``to(x, dtype)``: the first cast is lossless. A narrowing cast stays."""
    match node.inputs[0]:
        case Value(producer=Node("to", (Value() as x, *_))) as middle:
            first, last = x.type.dtype, node.output.type.dtype
            if not is_mergeable_cast(first, middle.type.dtype, last):
                return Skip(f"{first} -> {middle.type.dtype} -> {last} is not {first} -> {last}", 1)
            return x if first == last else build("to", x, **{**node.attrs, "dtype": last}, types=(node.output.type,))
    return Skip("its operand is not a cast")


def is_representable(narrow: torch.dtype, wide: torch.dtype) -> bool:
    """Whether one dtype can represent every element of the other.

    >>> [is_representable(torch.float16, wide) for wide in (torch.float32, torch.bfloat16)]
    [True, False]
    >>> is_representable(torch.int32, torch.float32)
    False
    """
    if narrow in INTEGER_BITS and wide in INTEGER_BITS:
        return all(a <= b for a, b in zip(INTEGER_BITS[narrow], INTEGER_BITS[wide], strict=True)) and wide != torch.bool
    if narrow in INTEGER_BITS and wide in FLOAT_BITS:
        return INTEGER_BITS[narrow][1] <= FLOAT_BITS[wide][1]
    if narrow in FLOAT_BITS and wide in FLOAT_BITS:
        return all(a <= b for a, b in zip(FLOAT_BITS[narrow], FLOAT_BITS[wide], strict=True))
    return False


def is_mergeable_cast(first: torch.dtype, middle: torch.dtype, last: torch.dtype) -> bool:
    """Whether casting ``first -> middle -> last`` equals ``first -> last`` for every element.

    Besides a lossless first cast, the second must be defined equally on both: a float outside the range of an integer
    dtype converts to any value, while an integer wraps around.
    """
    if not is_representable(first, middle):
        return False
    one_kind = all(d in INTEGER_BITS for d in (first, middle, last)) or all(
        d in FLOAT_BITS for d in (first, middle, last)
    )
    return last in (first, torch.bool) or is_representable(first, last) or one_kind


def _count_dynamic_dims(value: Value) -> int:
    return sum(not isinstance(size, int) for size in value.type.shape)


def _reshape(build: Builder, x: Value, output: Value):
    if x.type == output.type:
        return x
    return build("reshape", x, shape=output.type.shape, types=(output.type,))


class MergeChains(RulePass):
    """Merge chains of reshapes, permutes, expands and casts; chains equal to the identity are removed."""

    name = "merge-chains"
    rules = (
        merge_reshapes,
        merge_permutes,
        reshape_instead_of_permute,
        squeeze_before_permute,
        merge_expands,
        merge_casts,
    )
    after = ("remove-identities",)
