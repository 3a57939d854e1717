"""Parts of syntax trees that rewritten code consists of."""

from __future__ import annotations

import ast
from typing import Any, TypeVar

PREFIX = "_clika_"
"""The beginning of the names of generated functions."""

FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef
N = TypeVar("N", bound=ast.AST)


def make_lambda(body: ast.expr) -> ast.Lambda:
    """Return a function without arguments that evaluates an expression."""
    return locate(ast.Lambda(ast.arguments([], [], None, [], [], None, []), body), body)


def make_name(of: str | ast.FunctionDef) -> ast.Name:
    """Return an expression that reads a variable, or a generated function."""
    return ast.Name(of if isinstance(of, str) else of.name, ast.Load())


def make_call(owner: ast.expr, *arguments: Any) -> ast.expr:
    """Return a call of a function, or of the method that the first argument names."""
    if arguments and isinstance(arguments[0], str):
        owner, arguments = ast.Attribute(owner, arguments[0], ast.Load()), arguments[1:]
    return ast.Call(owner, [*arguments], [])


def locate(node: N, at: ast.AST) -> N:
    """Give a new node the first line of another one, for tracebacks."""
    place: Any = node
    place.lineno = place.end_lineno = at.lineno  # type: ignore[attr-defined]
    place.col_offset = place.end_col_offset = at.col_offset  # type: ignore[attr-defined]
    return node
