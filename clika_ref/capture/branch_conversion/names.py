"""The variables that statements assign and read, and those that are live after each branch and loop."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

FUNCTION_NODES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
"""Nodes with a scope of their own, whose code runs later."""

SCOPE_NODES = (*FUNCTION_NODES, ast.ClassDef, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
"""Nodes with a scope of their own."""

_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)


def iter_scope(nodes: Iterable[ast.AST]) -> Iterator[ast.AST]:
    """Yield nodes and all below them that are in the same scope: functions and classes, but not their bodies."""
    waiting = [*nodes][::-1]
    while waiting:
        node = waiting.pop()
        yield node
        if isinstance(node, _DEFINITIONS):
            waiting += node.decorator_list
        elif not isinstance(node, (ast.Lambda, *_COMPREHENSIONS)):
            waiting += [*ast.iter_child_nodes(node)][::-1]


def find_assigned(nodes: Iterable[ast.AST]) -> list[str]:
    """Return the names that nodes bind or delete in their own scope, each once, in order."""
    found: dict[str, None] = {}
    for node in iter_scope(nodes):
        found.update(dict.fromkeys(_bound_names(node)))
    return list(found)


def _bound_names(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Name):
        return [] if isinstance(node.ctx, ast.Load) else [node.id]
    if isinstance(node, _DEFINITIONS):
        return [node.name]
    if isinstance(node, ast.Import | ast.ImportFrom):
        return [alias.asname or alias.name.partition(".")[0] for alias in node.names]
    if isinstance(node, ast.ExceptHandler | ast.MatchAs | ast.MatchStar):
        return [node.name] if node.name else []
    if isinstance(node, ast.MatchMapping):
        return [node.rest] if node.rest else []
    if isinstance(node, _COMPREHENSIONS):  # its assignment expressions bind names outside of it
        return [inner.target.id for inner in ast.walk(node) if isinstance(inner, ast.NamedExpr)]
    return []


def find_read(*nodes: ast.AST | None) -> set[str]:
    """Return the names that nodes read, in inner scopes too."""
    read = (inner for node in nodes if node is not None for inner in ast.walk(node))
    return {inner.id for inner in read if isinstance(inner, ast.Name) and isinstance(inner.ctx, ast.Load)}


def find_declared(function: ast.AST, kind: type[ast.Global | ast.Nonlocal]) -> set[str]:
    """Return the names that a function declares as global or nonlocal."""
    return {n for node in iter_scope(ast.iter_child_nodes(function)) if isinstance(node, kind) for n in node.names}


def _find_own(node: ast.AST) -> set[str]:
    """Return the local variables of a function; none for another node."""
    if not isinstance(node, FUNCTION_NODES):
        return set()
    arguments = (a.arg for a in ast.walk(node.args) if isinstance(a, ast.arg))
    body = [] if isinstance(node, ast.Lambda) else node.body
    shared = find_declared(node, ast.Global) | find_declared(node, ast.Nonlocal)
    return {*arguments, *find_assigned(body)} - shared


@dataclass(frozen=True)
class _Exits:
    """The variables that are live where control flow may continue from a statement, besides the next one."""

    always: frozenset[str]
    """Live everywhere: read in functions that may run later, or by handlers of exceptions."""
    at_break: frozenset[str] = frozenset()
    at_continue: frozenset[str] = frozenset()


@dataclass
class Liveness:
    """The live variables of a function: those whose value may be read before they are assigned again."""

    after: dict[ast.AST, frozenset[str]] = field(default_factory=dict)
    """The variables that are live after each statement."""
    head: dict[ast.AST, frozenset[str]] = field(default_factory=dict)
    """The variables that are live before each test of a loop."""

    @classmethod
    def of(cls, function: ast.FunctionDef | ast.AsyncFunctionDef) -> Liveness:
        """Analyze the body of a function, backward from its end."""
        found = cls()
        later = [n for n in iter_scope(function.body) if isinstance(n, (*_DEFINITIONS, ast.Lambda, ast.GeneratorExp))]
        captured = {name for node in later for name in find_read(node) - _find_own(node)}
        outer = find_declared(function, ast.Global) | find_declared(function, ast.Nonlocal)
        found._block(function.body, frozenset(), _Exits(frozenset(captured | outer)))
        return found

    def _block(self, body: Sequence[ast.stmt], after: frozenset[str], exits: _Exits) -> frozenset[str]:
        """Return the variables that are live before a block, from those after it."""
        for statement in reversed(body):
            live = after | exits.always
            self.after[statement] = self.after.get(statement, frozenset()) | live
            after = self._statement(statement, live, exits)
        return after | exits.always

    def _statement(self, node: ast.stmt, after: frozenset[str], exits: _Exits) -> frozenset[str]:
        if isinstance(node, ast.If):
            return self._block(node.body, after, exits) | self._block(node.orelse, after, exits) | find_read(node.test)
        if isinstance(node, ast.While):
            return self._loop(node, frozenset(find_read(node.test)), frozenset(), after, exits)
        if isinstance(node, ast.For | ast.AsyncFor):
            read = frozenset(find_read(node.target))
            return frozenset(find_read(node.iter)) | self._loop(
                node, read, frozenset(find_assigned([node.target])), after, exits
            )
        if isinstance(node, ast.With | ast.AsyncWith):
            inner = replace(exits, always=exits.always | after)  # it may suppress an exception of any statement
            return self._block(node.body, after, inner) | find_read(*node.items)
        if isinstance(node, ast.Try | ast.TryStar | ast.Match):
            return self._guarded(node, after, exits)
        if isinstance(node, ast.Return | ast.Raise):
            return frozenset(find_read(node)) | exits.always
        if isinstance(node, ast.Break | ast.Continue):
            return exits.at_break if isinstance(node, ast.Break) else exits.at_continue
        assigned = set(find_assigned([node]))
        kept = find_assigned([node.target]) if isinstance(node, ast.AugAssign) else []
        return after.difference(assigned).union(find_read(node), kept)

    def _loop(
        self,
        node: ast.While | ast.For | ast.AsyncFor,
        read: frozenset[str],
        bound: frozenset[str],
        after: frozenset[str],
        exits: _Exits,
    ) -> frozenset[str]:
        """Return the variables that are live before a loop, those of its head, by repetition until they are stable."""
        head = self._block(node.orelse, after, exits) | read
        while True:
            inner = replace(exits, at_break=after, at_continue=head)
            grown = head | (self._block(node.body, head, inner) - bound)
            if grown == head:
                self.head[node] = head
                return head
            head = grown

    def _guarded(self, node: ast.Try | ast.TryStar | ast.Match, after: frozenset[str], exits: _Exits) -> frozenset[str]:
        """Return the live variables before a statement whose parts may run from any point: all that it reads."""
        live = after | find_read(node)
        inner = replace(exits, always=exits.always | live)
        parts = node.cases if isinstance(node, ast.Match) else [node, *node.handlers]
        for part in parts:
            for name in ("body", "orelse", "finalbody"):
                self._block(getattr(part, name, []), live, inner)
        return live
