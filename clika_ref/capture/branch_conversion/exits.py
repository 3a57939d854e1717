"""Find the statements by which a branch leaves its function or a loop around it."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence

from clika_ref.capture.branch_conversion.names import iter_scope

ExitNode = ast.Return | ast.Break | ast.Continue

SUSPENSIONS = (ast.Yield, ast.YieldFrom, ast.Await)


def find_direct_exits(body: Sequence[ast.stmt]) -> Iterator[ExitNode]:
    """Yield the exits of a block that are in no statement but ``if``."""
    for statement in body:
        if isinstance(statement, ExitNode):
            yield statement
        elif isinstance(statement, ast.If):
            yield from find_direct_exits([*statement.body, *statement.orelse])


def may_leave_loop(body: Sequence[ast.stmt]) -> bool:
    """Whether a block of a loop may leave the loop, outside of any other statement but ``if``."""
    return any(not isinstance(found, ast.Continue) for found in find_direct_exits(body))


def contains_return(body: Sequence[ast.AST]) -> bool:
    """Whether a block returns from its function."""
    return any(isinstance(inner, ast.Return) for inner in iter_scope(body))


def always_exits(body: Sequence[ast.stmt]) -> bool:
    """Whether a block surely never reaches its end."""
    if not body:
        return False
    last = body[-1]
    if isinstance(last, ast.If):
        return always_exits(last.body) and always_exits(last.orelse)
    return isinstance(last, ExitNode | ast.Raise) or (isinstance(last, ast.With) and always_exits(last.body))


def find_escapes(node: ast.If | ast.While, allowed: tuple[type[ExitNode], ...]) -> list[str]:
    """Describe the statements by which a branch or an iteration leaves its function or a loop around it.

    Args:
        node: a branch or loop.
        allowed: the types of exits that may be in it, in no statement but ``if``.
    """
    found: list[str] = []
    for block in (node.body, node.orelse):
        _search(block, allowed, found, in_loop=False, is_direct=isinstance(node, ast.If))
    return found


def _search(
    body: Sequence[ast.stmt], allowed: tuple[type[ExitNode], ...], found: list[str], *, in_loop: bool, is_direct: bool
) -> None:
    for statement in body:
        is_exit = isinstance(statement, ExitNode)
        if is_exit and not (is_direct and isinstance(statement, allowed)):
            if isinstance(statement, ast.Return) or not in_loop:
                found.append(_describe(statement))
        elif isinstance(statement, ast.If):
            found += _find_suspensions(statement.test)
            for part in (statement.body, statement.orelse):
                _search(part, allowed, found, in_loop=in_loop, is_direct=is_direct)
        elif isinstance(statement, ast.For | ast.AsyncFor | ast.While):
            found += _find_suspensions(statement)
            _search(statement.body, allowed, found, in_loop=True, is_direct=False)
            _search(statement.orelse, allowed, found, in_loop=in_loop, is_direct=False)
        elif not isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found += _find_suspensions(statement)
            for part in _list_blocks(statement):
                _search(part, allowed, found, in_loop=in_loop, is_direct=False)


def _describe(statement: ExitNode) -> str:
    kind = type(statement).__name__.lower()
    where = " inside of a loop, with or try" if isinstance(statement, ast.Return) else ""
    return f"it contains a {kind}{where} (line {statement.lineno})"


def _find_suspensions(node: ast.AST) -> list[str]:
    found = (inner for inner in iter_scope([node]) if isinstance(inner, SUSPENSIONS))
    return [f"it contains a {type(inner).__name__.lower()} (line {inner.lineno})" for inner in found]


def _list_blocks(statement: ast.stmt) -> list[list[ast.stmt]]:
    """Return the blocks of a ``with``, ``try`` or ``match``."""
    parts = [n for n in ast.iter_child_nodes(statement) if isinstance(n, ast.ExceptHandler | ast.match_case)]
    return [block for part in (statement, *parts) for _, block in ast.iter_fields(part) if _is_block(block)]


def _is_block(value: object) -> bool:
    return isinstance(value, list) and bool(value) and isinstance(value[0], ast.stmt)
