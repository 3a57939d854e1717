"""Remove calls that return their operand."""

from __future__ import annotations

from typing import Any

from clika_ref.core.inference import Builder
from clika_ref.core.ir import Node, Value
from clika_ref.core.rewriter import Skip, rule
from clika_ref_cleanup.cleanup_pass import RulePass

IDENTITY_IF_SAME_TYPE = (
    *("identity", "alias", "clone", "contiguous", "lift_fresh_copy"),
    *("to", "reshape", "view", "flatten", "unflatten", "expand", "squeeze", "repeat", "tile"),
    # A slice of unchanged length starts at 0 with step 1, and a split with a single result returns all elements.
    *("slice", "narrow", "cat", "concat", "split", "split_with_sizes", "chunk"),
)
"""Operators that return their operand whenever the result has its type."""


@rule(*IDENTITY_IF_SAME_TYPE)
def remove_identity(node: Node, build: Builder):
    """A copy, or a reshape or cast to the same shape and dtype."""
    operands = [v for v in node.inputs if isinstance(v, Value)]
    if len(operands) != 1 or len(node.outputs) != 1:
        return Skip("joins or splits")
    return _return_if_same_type(operands[0], node)


@rule("permute", "roll", "pad", "constant_pad_nd")
def remove_idle_move(node: Node, build: Builder):
    """An identity permutation, a roll by 0, or a pad by 0."""
    x, rank = node.inputs[0], node.output.type.rank
    match node.op_type, node.attrs:
        case "permute", {"dims": dims}:
            idle = [d % rank for d in dims] == list(range(rank))
        case _, {"shifts": amounts} | {"pad": amounts}:
            idle = all(isinstance(a, int) and a == 0 for a in amounts)
        case _:
            idle = False
    return _return_if_same_type(x, node, 1) if idle else Skip("moves elements")


@rule("add", "sub", "mul", "div", "pow")
def remove_neutral_operand(node: Node, build: Builder):
    """``x + 0``, ``x - 0``, ``x * 1``, ``x / 1``, ``x ** 1``."""
    match node.op_type, node.inputs:
        case "add" | "mul", (int() | float() as number, Value() as x):
            pass
        case _, (Value() as x, int() | float() as number):
            pass
        case _:
            return Skip("no operand is a number")
    if node.attrs.get("alpha", 1) != 1 or node.attrs.get("rounding_mode") is not None:
        return Skip("scales or rounds too", 1)
    if number != (0 if node.op_type in ("add", "sub") else 1):
        return Skip(f"{number} is not neutral", 1)
    return _return_if_same_type(x, node, 2)


def _return_if_same_type(x: Any, node: Node, closeness: int = 0):
    """Return an operand to replace the result of a node, or `Skip` if its type differs."""
    return x if x.type == node.output.type else Skip("changes the type", closeness)


class RemoveIdentities(RulePass):
    """Remove copies, casts and shape changes without effect, and arithmetic with neutral numbers.

    All elements stay equal. Only the sign of a zero may change: ``x + 0.0`` is 0.0 where ``x`` is -0.0, and becomes
    ``x``. ``detach`` stays (it stops gradients); see ``remove-detach``. Values of constants are ignored: a parameter
    that is 1 now may be trained.
    """

    name = "remove-identities"
    rules = (remove_identity, remove_idle_move, remove_neutral_operand)
    after = ("remove-dropout",)
