"""Rewrite conditions inside expressions: ``and``, ``or``, ``not``, conditional expressions, chained comparisons."""

from __future__ import annotations

import ast
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast

from clika_ref.capture.branch_conversion.syntax import locate, make_call, make_lambda, make_name

PLAIN_CALLS = frozenset({"isinstance", "issubclass", "hasattr", "callable", "len"})
"""Functions whose result depends on no element of a tensor."""

CHAIN_METHODS = {
    ast.Lt: "less",
    ast.LtE: "less_or_equal",
    ast.Gt: "greater",
    ast.GtE: "greater_or_equal",
    ast.Eq: "equal",
    ast.NotEq: "not_equal",
    ast.Is: "is_same",
    ast.IsNot: "is_other",
    ast.In: "is_in",
    ast.NotIn: "is_not_in",
}
"""The names of comparison operators."""


@dataclass(frozen=True)
class SiteDescription:
    """A branch, loop or condition in the source of a function."""

    kind: str
    """What it is: ``if``, ``while``, ``for``, ``and`` ..."""
    line: int
    merged: tuple[str, ...] = ()
    """The variables that it assigns and that are read afterward."""
    assigned: tuple[str, ...] = ()
    """All variables that it assigns."""
    tested: tuple[str, ...] = ()
    """The variables that the test of a loop assigns."""
    obstacles: tuple[str, ...] = ()
    """Statements in it that no graph can contain, with their lines."""


SiteFactory = Callable[[SiteDescription], ast.expr]
"""Returns the expression of a new site, an object with the methods that rewritten code calls."""


def is_plain(node: ast.expr) -> bool:
    """Whether the value of an expression surely depends on no element of a tensor."""
    if isinstance(node, ast.Constant):
        return True
    if isinstance(node, ast.Attribute):
        return node.attr == "training"
    if isinstance(node, ast.UnaryOp):
        return isinstance(node.op, ast.Not) and is_plain(node.operand)
    if isinstance(node, ast.BoolOp):
        return all(map(is_plain, node.values))
    if isinstance(node, ast.Compare):
        is_identity = all(isinstance(op, ast.Is | ast.IsNot) for op in node.ops)
        return is_identity or all(map(is_plain, (node.left, *node.comparators)))
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in PLAIN_CALLS


class ExpressionRewriter(ast.NodeTransformer):
    """Rewrites conditions inside expressions, outside of inner functions."""

    def __init__(self, make_site: SiteFactory, first_parameter: Sequence[str]) -> None:
        self._make_site = make_site
        self._first_parameter = first_parameter

    def visit_truth(self, node: ast.expr) -> ast.expr:
        """Rewrite an expression of which only the truth value matters."""
        if isinstance(node, ast.BoolOp) and not is_plain(node):
            return self._bool_op(node, is_truth=True)
        return self.visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> ast.expr:
        """Rewrite ``and`` and ``or``."""
        return node if is_plain(node) else self._bool_op(node, is_truth=False)

    def _bool_op(self, node: ast.BoolOp, *, is_truth: bool) -> ast.expr:
        kind = "and" if isinstance(node.op, ast.And) else "or"
        if any(_binds_names(operand) for operand in node.values[1:]):
            reason = "an operand assigns a variable with :=. Assign it before"
            node.values = [self._require_plain(kind, operand, reason) for operand in node.values]
            return node
        operands = [self.visit_truth(v) if is_truth else self.visit(v) for v in node.values]
        result = operands[-1]
        for operand in operands[-2::-1]:  # a and b and c is a and (b and c)
            name = f"{'truth' if is_truth else 'value'}_{kind}"
            result = locate(make_call(self._site(kind, node), name, operand, make_lambda(result)), node)
        return result

    def visit_UnaryOp(self, node: ast.UnaryOp) -> ast.expr:
        """Rewrite ``not``."""
        if not isinstance(node.op, ast.Not) or is_plain(node):
            return cast("ast.expr", self.generic_visit(node))
        return locate(make_call(self._site("not", node), "negate", self.visit_truth(node.operand)), node)

    def visit_IfExp(self, node: ast.IfExp) -> ast.expr:
        """Rewrite a conditional expression."""
        if is_plain(node.test):
            return cast("ast.expr", self.generic_visit(node))
        if _binds_names(node.body) or _binds_names(node.orelse):
            node.test = self._require_plain("if", node.test, "a branch assigns a variable with :=")
            node.body, node.orelse = self.visit(node.body), self.visit(node.orelse)
            return node
        test, branches = self.visit_truth(node.test), [make_lambda(self.visit(n)) for n in (node.body, node.orelse)]
        return locate(make_call(self._site("if", node), "select", test, *branches), node)

    def visit_Compare(self, node: ast.Compare) -> ast.expr:
        """Rewrite a chain of comparisons."""
        if len(node.ops) == 1 or is_plain(node) or any(map(_binds_names, node.comparators)):
            return cast("ast.expr", self.generic_visit(node))
        pairs = zip(node.ops, node.comparators, strict=True)
        steps = [
            ast.Tuple([ast.Constant(CHAIN_METHODS[type(op)]), make_lambda(self.visit(operand))], ast.Load())
            for op, operand in pairs
        ]
        return locate(make_call(self._site("and", node), "compare", self.visit(node.left), *steps), node)

    def visit_Call(self, node: ast.Call) -> ast.expr:
        """Rewrite reads of numbers, and ``super()``, which reads the arguments of its frame."""
        self.generic_visit(node)
        if isinstance(node.func, ast.Attribute) and node.func.attr == "item" and not node.args:
            return locate(make_call(self._site("item", node), "read_item", node.func.value), node)
        if isinstance(node.func, ast.Name) and not node.keywords:
            if node.func.id in ("bool", "int", "float") and len(node.args) == 1:
                return locate(make_call(self._site(node.func.id, node), "to_number", node.func, *node.args), node)
            if node.func.id == "super" and not node.args and self._first_parameter:
                node.args = [make_name("__class__"), make_name(self._first_parameter[0])]
                return ast.fix_missing_locations(locate(node, node))
        return node

    def visit_comprehension(self, node: ast.comprehension) -> ast.comprehension:
        """Reject traced conditions of a comprehension."""
        self.generic_visit(node)
        reason = "it is the condition of a comprehension. Write a loop"
        node.ifs = [test if is_plain(test) else self._require_plain("if", test, reason) for test in node.ifs]
        return node

    def visit_Lambda(self, node: ast.Lambda) -> ast.Lambda:
        """Rewrite the conditions in a lambda."""
        node.body = ExpressionRewriter(self._make_site, ()).visit(node.body)
        return node

    def _require_plain(self, kind: str, node: ast.expr, reason: str) -> ast.expr:
        site = self._make_site(SiteDescription(kind, node.lineno, obstacles=(reason,)))
        return locate(make_call(site, "require_plain", self.visit_truth(node)), node)

    def _site(self, kind: str, node: ast.expr) -> ast.expr:
        return self._make_site(SiteDescription(kind, node.lineno))


def _binds_names(node: ast.expr) -> bool:
    """Whether an expression binds variables, or suspends its function: a lambda cannot contain it."""
    return any(isinstance(n, ast.NamedExpr | ast.Yield | ast.YieldFrom | ast.Await) for n in ast.walk(node))
