"""Layout-agnostic operators, and how their attributes change under a permutation of dims."""

from __future__ import annotations

from typing import Any

from clika_ref.core.ir import Node, Value
from clika_ref.core.types import TensorType

DimOrder = tuple[int, ...]
"""A permutation as in ``permute``: dim ``i`` of the result is dim ``order[i]`` of the operand."""

_UNARY_NAMES = (
    "abs acos acosh asin asinh atan atanh bitwise_not ceil celu clamp cos cosh deg2rad elu erf erfc exp exp2 expm1 "
    "floor frac gelu hardshrink hardsigmoid hardswish hardtanh identity isfinite isinf isnan isneginf isposinf "
    "leaky_relu log log10 log1p log2 log_sigmoid logical_not logit mish nan_to_num neg rad2deg reciprocal relu relu6 "
    "round rsqrt selu sigmoid sign signbit silu sin sinc sinh softplus softshrink sqrt square tan tanh threshold to "
    "trunc"
)
_NARY_NAMES = (
    "add addcdiv addcmul atan2 bitwise_and bitwise_left_shift bitwise_or bitwise_right_shift bitwise_xor copysign div "
    "eq float_power fmax fmin fmod ge gt heaviside hypot isclose le lerp logaddexp logaddexp2 logical_and logical_or "
    "logical_xor lt masked_fill maximum minimum mul ne pow remainder sub where xlogy"
)
ELEMENTWISE = frozenset(f"{_UNARY_NAMES} {_NARY_NAMES}".split())
"""Operators with each output element depending only on the input elements at the same index (after broadcasting)."""

DIM_ATTRIBUTES = {
    **dict.fromkeys(("softmax", "log_softmax", "slice", "cat", "glu", "split_with_sizes"), "dim"),
    **dict.fromkeys(("roll", "flip"), "dims"),
}
"""Rank-preserving operators that work along given dims, with the name of the attribute for these."""

REDUCTIONS = frozenset(("sum", "mean", "nansum", "nanmean", "amax", "amin", "logsumexp", "var", "std"))
"""Operators that reduce over the dims ``dim``; with ``keepdim`` they preserve the rank."""

LAST_DIM_OPERATORS = frozenset(("linear", "layer_norm", "rms_norm"))
"""Operators along the last dim of the first operand, independent of the index in all others."""

LAYOUT_AGNOSTIC = LAST_DIM_OPERATORS | ELEMENTWISE | REDUCTIONS | DIM_ATTRIBUTES.keys()
"""Operators with calls that can be computed in another dim order."""


def invert_order(order: DimOrder) -> DimOrder:
    """Return the inverse of a permutation.

    >>> invert_order((1, 2, 0))
    (2, 0, 1)
    """
    return tuple(sorted(range(len(order)), key=order.__getitem__))


def compose_orders(first: DimOrder, second: DimOrder) -> DimOrder:
    """Return the composed permutation, equal to ``permute(permute(x, first), second)``."""
    return tuple(first[d] for d in second)


def order_of(node: Node | None) -> DimOrder | None:
    """Return the permutation that a node applies, or None if it is no permute or the identity."""
    if node is None or node.op_type != "permute":
        return None
    order = tuple(d % len(node.attrs["dims"]) for d in node.attrs["dims"])
    return None if order == tuple(range(len(order))) else order


def permute_type(type: TensorType, order: DimOrder) -> TensorType:
    """Return the type of ``permute(x, order)``."""
    return TensorType(type.dtype, tuple(type.shape[d] for d in order))


def dims_of(node: Node) -> tuple[int, ...] | None:
    """Return the dims that the attributes of an operator name, or None if they name all or none."""
    named: Any = node.attrs[DIM_ATTRIBUTES.get(node.op_type, "dim")]
    dims = (named,) if isinstance(named, int) else named
    return tuple(dims) if dims and all(isinstance(d, int) for d in dims) else None


def permute_attrs(node: Node, order: DimOrder) -> dict[str, Any]:
    """Return the attributes that compute on operands ``x`` the same as the node's own on ``permute(x, order)``."""
    if node.op_type not in DIM_ATTRIBUTES and node.op_type not in REDUCTIONS:
        return node.attrs
    attribute = DIM_ATTRIBUTES.get(node.op_type, "dim")
    dims = tuple(order[d] for d in dims_of(node) or ())
    return {**node.attrs, attribute: dims[0] if isinstance(node.attrs[attribute], int) else dims}


def operands_to_permute(node: Node) -> tuple[int, ...] | None:
    """Return the indices of operands to permute together with the results, or None if the dim order matters."""
    if node.op_type not in LAYOUT_AGNOSTIC:
        return None
    outputs = {value.type.rank for value in node.outputs}
    if len(outputs) != 1 or outputs <= {0, 1}:
        return None
    if node.op_type in LAST_DIM_OPERATORS:
        is_last_dim_only = len(node.attrs.get("normalized_shape", (0,))) == 1
        return (0,) if is_last_dim_only and _rank(node.inputs[0]) in outputs else None
    if node.op_type in DIM_ATTRIBUTES or node.op_type in REDUCTIONS:
        if dims_of(node) is None or (node.op_type in REDUCTIONS and not node.attrs["keepdim"]):
            return None
        return tuple(range(len(node.inputs))) if {_rank(v) for v in node.inputs} == outputs else None
    return tuple(range(len(node.inputs)))


def _rank(operand: Any) -> int | None:
    return operand.type.rank if isinstance(operand, Value) else None
