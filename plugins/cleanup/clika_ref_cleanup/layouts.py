"""Which operators compute alike in any order of sides, and how their attributes follow a permutation."""

from __future__ import annotations

from typing import Any

from clika_ref.core.ir import Node, Value
from clika_ref.core.types import TensorType

Order = tuple[int, ...]
"""A permutation as ``permute`` takes it: side ``i`` of the result is side ``order[i]`` of the operand."""

_OF_ONE = (
    "abs acos acosh asin asinh atan atanh bitwise_not ceil celu clamp cos cosh deg2rad elu erf erfc exp exp2 expm1 "
    "floor frac gelu hardshrink hardsigmoid hardswish hardtanh identity isfinite isinf isnan isneginf isposinf "
    "leaky_relu log log10 log1p log2 log_sigmoid logical_not logit mish nan_to_num neg rad2deg reciprocal relu relu6 "
    "round rsqrt selu sigmoid sign signbit silu sin sinc sinh softplus softshrink sqrt square tan tanh threshold to "
    "trunc"
)
_OF_SEVERAL = (
    "add addcdiv addcmul atan2 bitwise_and bitwise_left_shift bitwise_or bitwise_right_shift bitwise_xor copysign div "
    "eq float_power fmax fmin fmod ge gt heaviside hypot isclose le lerp logaddexp logaddexp2 logical_and logical_or "
    "logical_xor lt masked_fill maximum minimum mul ne pow remainder sub where xlogy"
)
ELEMENTWISE = frozenset(f"{_OF_ONE} {_OF_SEVERAL}".split())
"""Operators of which each element depends on the elements at its own place only (after broadcasting)."""

ALONG_SIDES = {
    **dict.fromkeys(("softmax", "log_softmax", "slice", "cat", "glu", "split_with_sizes"), "dim"),
    **dict.fromkeys(("roll", "flip"), "dims"),
}
"""Operators that keep the rank and name the sides along which they work, and the attribute that names them."""

REDUCTIONS = frozenset(("sum", "mean", "nansum", "nanmean", "amax", "amin", "logsumexp", "var", "std"))
"""Operators that name the sides ``dim`` over which they reduce; with ``keepdim`` they keep the rank."""

ON_LAST_SIDE = frozenset(("linear", "layer_norm", "rms_norm"))
"""Operators that work along the last side of the first operand, and alike at each place of the others."""

MOVABLE = ON_LAST_SIDE | ELEMENTWISE | REDUCTIONS | ALONG_SIDES.keys()
"""Operators of which there are calls that compute alike in another order of sides."""


def inverse(order: Order) -> Order:
    """Return the permutation that undoes another.

    >>> inverse((1, 2, 0))
    (2, 0, 1)
    """
    return tuple(sorted(range(len(order)), key=order.__getitem__))


def after(first: Order, second: Order) -> Order:
    """Return the one permutation that does what ``permute(permute(x, first), second)`` does."""
    return tuple(first[d] for d in second)


def order_of(node: Node | None) -> Order | None:
    """Return the permutation that a node applies, None if it is no permute or leaves every side in place."""
    if node is None or node.kind != "permute":
        return None
    order = tuple(d % len(node.attrs["dims"]) for d in node.attrs["dims"])
    return None if order == tuple(range(len(order))) else order


def reordered(type: TensorType, order: Order) -> TensorType:
    """Return the type of ``permute(x, order)``."""
    return TensorType(type.dtype, tuple(type.shape[d] for d in order))


def sides_of(node: Node) -> tuple[int, ...] | None:
    """Return the sides that the attributes of an operator on sides name; None where they name all or none."""
    named: Any = node.attrs[ALONG_SIDES.get(node.kind, "dim")]
    sides = (named,) if isinstance(named, int) else named
    return tuple(sides) if sides and all(isinstance(d, int) for d in sides) else None


def moved_attrs(node: Node, order: Order) -> dict[str, Any]:
    """Return the attributes with which a node computes on operands ``x`` what it does on ``permute(x, order)``."""
    if node.kind not in ALONG_SIDES and node.kind not in REDUCTIONS:
        return node.attrs
    attribute = ALONG_SIDES.get(node.kind, "dim")
    sides = tuple(order[d] for d in sides_of(node) or ())
    return {**node.attrs, attribute: sides[0] if isinstance(node.attrs[attribute], int) else sides}


def carriers(node: Node) -> tuple[int, ...] | None:
    """Return the operands that must be permuted alike for the results to be; None where no order of sides would do."""
    if node.kind not in MOVABLE:
        return None
    outputs = {value.type.rank for value in node.outputs}
    if len(outputs) != 1 or outputs <= {0, 1}:
        return None
    if node.kind in ON_LAST_SIDE:
        alone = len(node.attrs.get("normalized_shape", (0,))) == 1
        return (0,) if alone and _rank(node.inputs[0]) in outputs else None
    if node.kind in ALONG_SIDES or node.kind in REDUCTIONS:
        if sides_of(node) is None or (node.kind in REDUCTIONS and not node.attrs["keepdim"]):
            return None
        return tuple(range(len(node.inputs))) if {_rank(v) for v in node.inputs} == outputs else None
    return tuple(range(len(node.inputs)))


def _rank(operand: Any) -> int | None:
    return operand.type.rank if isinstance(operand, Value) else None
