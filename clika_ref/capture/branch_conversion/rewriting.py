"""Rewrite the branches and loops of a function as calls that decide at run time how to evaluate them.

A branch becomes a function without arguments that shares the variables of its function. So a condition with a plain
value runs the same statements as before, and one that is traced runs both branches, and merges what they assign.
"""

from __future__ import annotations

import ast
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from clika_ref.capture.branch_conversion.exits import (
    ExitNode,
    always_exits,
    contains_return,
    find_direct_exits,
    find_escapes,
    may_leave_loop,
)
from clika_ref.capture.branch_conversion.expressions import (
    ExpressionRewriter,
    SiteDescription,
    SiteFactory,
    is_plain,
)
from clika_ref.capture.branch_conversion.names import Liveness, find_assigned, find_declared, iter_scope
from clika_ref.capture.branch_conversion.syntax import PREFIX, FunctionNode, locate, make_call, make_name

LOOP_PREFIX = "_clikaloop_"
"""The beginning of the names of variables that hold an unrolled loop."""

ITEM_NAME = "_clikaitem"
"""The name of the argument of functions that assign an item to the variables of a loop."""

UNCONVERTIBLE_CALLS = frozenset({"locals", "vars", "dir", "eval", "exec"})
"""Functions that see the variables of their caller, which has others after a rewrite."""


def rewrite_function(function: FunctionNode, make_site: SiteFactory) -> None:
    """Rewrite the branches, loops and conditions of a function in place, also those of functions inside.

    Args:
        function: the syntax tree of the function.
        make_site: creates a site, and returns an expression whose value it is.
    """
    _FunctionRewriter(function, make_site).run()


def find_reason_against(function: ast.AST) -> str:
    """Return why a function cannot be rewritten; "" if it can."""
    if isinstance(function, ast.Lambda):
        return "it is in a lambda. Write it as a function with def"
    if isinstance(function, ast.AsyncFunctionDef):
        return "it is in a coroutine"
    assert isinstance(function, ast.FunctionDef)
    for node in iter_scope(function.body):
        if isinstance(node, ast.Yield | ast.YieldFrom):
            return "it is in a generator. Return a list instead"
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in UNCONVERTIBLE_CALLS:
            return f"its function calls {node.func.id}()"
    return ""


@dataclass
class _Place:
    """Where the current statement is: in the function itself, or in the body of a loop that is a function."""

    loop: str = ""
    """The variable that holds the loop whose body contains it; "" outside of such loops."""
    merged: tuple[str, ...] = ()
    """The variables of that loop that are read after it."""
    head: frozenset[str] = frozenset()
    """The variables that are live at the end of an iteration of that loop."""
    is_inner: bool = False
    """Whether it is in an inner loop that is still a loop of Python, to which break and continue belong."""

    @property
    def exits(self) -> tuple[type[ExitNode], ...]:
        """The types of exits that branches at the end of this place may contain."""
        return (ast.Return, ast.Break, ast.Continue) if self.loop else (ast.Return,)


class _Continuation(ast.Return):
    """A return of generated code, with the result of the code after a branch."""


class _FunctionRewriter:
    """Rewrites one function: its statements from the outside in, and the expressions in them."""

    def __init__(self, function: FunctionNode, make_site: SiteFactory) -> None:
        self._function = function
        self._make_site = make_site
        self._numbers = itertools.count(1)
        self._liveness = Liveness.of(function)
        self._assigned = find_assigned(function.body)
        self._globals = find_declared(function, ast.Global)
        self._nonlocals = find_declared(function, ast.Nonlocal)
        arguments = function.args
        first = [a.arg for a in (*arguments.posonlyargs, *arguments.args)][:1]
        self._argument_names = {a.arg for a in ast.walk(arguments) if isinstance(a, ast.arg)}
        self._shared: dict[str, None] = {}
        """The variables that generated functions assign."""
        self._reason_against = find_reason_against(function)
        self._expressions = ExpressionRewriter(make_site, first)
        self._place = _Place()

    def run(self) -> None:
        body = self._function.body
        has_docstring = isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Constant)
        start = [body[0]] if has_docstring else []
        rewritten = self._block(body[len(start) :], is_tail=not self._reason_against)
        own = [n for n in self._shared if n not in self._globals | self._nonlocals | self._argument_names]
        # Never runs, but makes the variables local to this function, so that generated functions can share them.
        bound: list[ast.stmt] = [ast.Assign([ast.Name(n, ast.Store())], ast.Constant(None)) for n in own]
        declared = [ast.If(ast.Constant(False), bound, [])] if bound else []
        pairs = ((ast.Global, self._globals), (ast.Nonlocal, self._nonlocals))
        outer = [kind(sorted(names)) for kind, names in pairs if names]
        added = [locate(s, body[0]) for s in (*outer, *declared)]
        self._function.body = [*start, *added, *(rewritten or [ast.Pass()])]
        ast.fix_missing_locations(self._function)

    def _block(self, body: Sequence[ast.stmt], *, is_tail: bool) -> list[ast.stmt]:
        """Rewrite a block; ``is_tail`` if the function returns at its end."""
        result: list[ast.stmt] = []
        for position, statement in enumerate(body):
            rest = body[position + 1 :]
            if isinstance(statement, ast.If) and is_tail and self._needs_exit_form(statement):
                return result + self._exiting_if(statement, rest)
            if isinstance(statement, ast.For):
                form = self._select_loop_form(statement, is_tail=is_tail)
                if form == "return":
                    return result + self._returning_for(statement, rest)
                if form == "merge":
                    result += self._merging_for(statement)
                    continue
            result += self._statement(statement, is_tail=is_tail and not rest)
        return result

    def _needs_exit_form(self, node: ast.If) -> bool:
        """Whether a branch leaves the function or the loop, and a condition on the way there may be traced."""
        if find_escapes(node, self._place.exits) or not any(find_direct_exits([node])):
            return False
        within = [inner for inner in iter_scope([node]) if isinstance(inner, ast.If)]
        return any(not is_plain(inner.test) and any(find_direct_exits([inner])) for inner in within)

    def _select_loop_form(self, node: ast.For, *, is_tail: bool) -> Literal["", "return", "merge"]:
        """Return how to rewrite a loop with branches that leave it; "" for a loop that stays as it is."""
        place, self._place = self._place, _Place(LOOP_PREFIX)
        branches = [n for n in iter_scope(node.body) if isinstance(n, ast.If) and self._needs_exit_form(n)]
        self._place = place
        is_suspended = any(isinstance(n, ast.Yield | ast.YieldFrom | ast.Await) for n in iter_scope([node]))
        leaves_outer = any(not isinstance(n, ast.Return) for n in find_direct_exits(node.orelse))
        direct = {id(n) for n in find_direct_exits(node.body)}
        if not any(id(n) in direct for branch in branches for n in find_direct_exits([branch])):
            return ""
        if self._reason_against or is_suspended or leaves_outer:
            return ""
        if not contains_return([*node.body, *node.orelse]):
            return "merge"
        return "return" if is_tail and not place.loop else ""

    def _statement(self, node: ast.stmt, *, is_tail: bool) -> list[ast.stmt]:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            rewrite_function(node, self._make_site)
            return [node]
        if isinstance(node, ast.Global | ast.Nonlocal):
            return [locate(ast.Pass(), node)]  # declared at the start of the function
        if isinstance(node, ast.ClassDef | ast.Import | ast.ImportFrom):
            return [node]
        if isinstance(node, ExitNode):
            return [self._rewrite_exit(node)]
        if isinstance(node, ast.If):
            return self._if(node)
        if isinstance(node, ast.While):
            return self._while(node)
        if isinstance(node, ast.Assert):
            node.test = self._reject(node.test, "assert", node, "an assertion is no part of a graph. Remove it")
            node.msg = node.msg and self._expressions.visit(node.msg)
            return [node]
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):  # no annotation of a shared variable
            if node.value is None:
                return [locate(ast.Pass(), node)]
            node = locate(ast.Assign([node.target], node.value), node)
        if isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name):
            return [self._augmented_assignment(node, node.target)]
        self._inner_blocks(node, is_tail=is_tail)
        return [node]

    def _rewrite_exit(self, node: ExitNode) -> ast.stmt:
        """Rewrite an exit; in the body of a loop that is a function, it returns what the loop does next."""
        if isinstance(node, _Continuation):
            return node
        if isinstance(node, ast.Return) and node.value is not None:
            node.value = self._expressions.visit(node.value)
        place = self._place
        if not place.loop or (place.is_inner and not isinstance(node, ast.Return)):
            return node
        if isinstance(node, ast.Continue):
            return locate(ast.Return(), node)
        loop = make_name(place.loop)
        if isinstance(node, ast.Break):
            return locate(ast.Return(make_call(loop, "leave")), node)
        return locate(ast.Return(make_call(loop, "finish", node.value or ast.Constant(None))), node)

    def _augmented_assignment(self, node: ast.AugAssign, target: ast.Name) -> ast.stmt:
        """Rewrite ``x += 1``, which changes a tensor in place, but not a number that is traced as a tensor."""
        site = self._make_site(SiteDescription("assignment", node.lineno))
        value = self._expressions.visit(node.value)
        call = make_call(site, "augment", ast.Constant(type(node.op).__name__), make_name(target.id), value)
        return locate(ast.Assign([target], locate(call, node)), node)

    def _inner_blocks(self, node: ast.AST, *, is_tail: bool) -> None:
        """Rewrite the expressions and blocks of any other statement."""
        is_tail = is_tail and isinstance(node, ast.With) and not self._place.loop
        for name, value in ast.iter_fields(node):
            if isinstance(value, ast.expr):
                setattr(node, name, self._expressions.visit(value))
            elif isinstance(value, list) and value and isinstance(value[0], ast.stmt):
                is_body = isinstance(node, ast.For | ast.AsyncFor) and name == "body"
                setattr(node, name, self._loop_body(value) if is_body else self._block(value, is_tail=is_tail))
            elif isinstance(value, list):
                for position, item in enumerate(value):
                    if isinstance(item, ast.expr):
                        value[position] = self._expressions.visit(item)
                    elif isinstance(item, ast.AST):  # a handler, a case, or an item of with
                        self._inner_blocks(item, is_tail=False)

    def _loop_body(self, body: Sequence[ast.stmt]) -> list[ast.stmt]:
        """Rewrite the body of a loop that stays a loop of Python."""
        was_inner, self._place.is_inner = self._place.is_inner, True
        rewritten = self._block(body, is_tail=False)
        self._place.is_inner = was_inner
        return rewritten

    # Branches and loops

    def _if(self, node: ast.If) -> list[ast.stmt]:
        escapes = [] if is_plain(node.test) else find_escapes(node, ())
        if is_plain(node.test) or escapes or self._reason_against:
            if not is_plain(node.test):
                node.test = self._reject(node.test, "if", node, self._reason_against or escapes[0])
            node.body, node.orelse = (self._block(part, is_tail=False) for part in (node.body, node.orelse))
            return [node]
        site = self._site("if", node, [*node.body, *node.orelse], self._liveness.after[node])
        true, false = (self._branch(part, node, is_tail=False) for part in (node.body, node.orelse))
        call = make_call(site, "run_if", self._truth(node.test), make_name(true), make_name(false))
        return [true, false, locate(ast.Expr(call), node)]

    def _exiting_if(self, node: ast.If, rest: Sequence[ast.stmt]) -> list[ast.stmt]:
        """Rewrite an ``if`` with the statements after it: each branch returns the result of the function."""
        ends = [always_exits(part) for part in (node.body, node.orelse)]
        after: list[ast.stmt] = []
        continuation: Sequence[ast.stmt] = rest
        obstacles = self._find_obstacles([*node.body, *node.orelse], [node, *rest], is_exit=True)
        if rest and not any(ends):  # both branches go on: share the code after them
            shared = self._branch(rest, rest[0], is_tail=True)
            after, continuation = [shared], [locate(_Continuation(make_call(make_name(shared))), rest[0])]
        parts = [
            [*part, *([] if does_end else continuation)]
            for part, does_end in zip((node.body, node.orelse), ends, strict=True)
        ]
        if self._place.loop and not any(map(may_leave_loop, parts)):
            return [*after, *self._ending_iteration(node, parts, obstacles)]
        description = SiteDescription("if", node.lineno, self._place.merged, tuple(self._assigned), obstacles=obstacles)
        site = self._make_site(description)
        true, false = (self._branch(part, node, is_tail=True) for part in parts)
        method = ["run_exit", make_name(self._place.loop)] if self._place.loop else ["run_return"]
        call = make_call(site, *method, self._truth(node.test), make_name(true), make_name(false))
        return [*after, true, false, locate(ast.Return(call), node)]

    def _ending_iteration(
        self, node: ast.If, parts: Sequence[Sequence[ast.stmt]], obstacles: tuple[str, ...]
    ) -> list[ast.stmt]:
        """Rewrite an ``if`` whose branches end the iteration: its variables are merged for the next one."""
        assigned = find_assigned([statement for part in parts for statement in part])
        merged = tuple(name for name in assigned if name in self._place.head)
        site = self._make_site(SiteDescription("if", node.lineno, merged, tuple(self._assigned), obstacles=obstacles))
        true, false = (self._branch(part, node, is_tail=True) for part in parts)
        call = make_call(site, "run_if", self._truth(node.test), make_name(true), make_name(false))
        return [true, false, locate(ast.Expr(call), node)]

    def _while(self, node: ast.While) -> list[ast.stmt]:
        escapes = [] if is_plain(node.test) else find_escapes(node, ())
        if is_plain(node.test) or escapes or self._reason_against:
            if not is_plain(node.test):
                node.test = self._reject(node.test, "while", node, self._reason_against or escapes[0])
            node.body, node.orelse = self._loop_body(node.body), self._block(node.orelse, is_tail=False)
            return [node]
        live = self._liveness.after[node] | self._liveness.head[node]
        site = self._site("while", node, [node.test, *node.body], live)
        assigned = find_assigned([node.test])
        test = self._function_of([locate(ast.Return(self._truth(node.test)), node.test)], assigned, node)
        body = self._branch(node.body, node, is_tail=False)
        call = locate(ast.Expr(make_call(site, "run_while", make_name(test), make_name(body))), node)
        return [test, body, call, *self._block(node.orelse, is_tail=False)]

    def _merging_for(self, node: ast.For) -> list[ast.stmt]:
        """Rewrite a loop that a traced condition may leave; its variables are merged after the last iteration."""
        assigning = [node.target, *node.body, *node.orelse]
        merged = tuple(n for n in find_assigned(assigning) if n in self._liveness.after[node])
        site, iterable = self._loop_site(node, merged), self._expressions.visit(node.iter)
        parts = [*self._loop_parts(node, merged), self._branch(node.orelse, node, is_tail=False)]
        call = make_call(site, "run_for", iterable, *map(make_name, parts))
        return [*parts, locate(ast.Expr(call), node)]

    def _returning_for(self, node: ast.For, rest: Sequence[ast.stmt]) -> list[ast.stmt]:
        """Rewrite a loop that a traced condition may leave, with the statements after it."""
        site, iterable = self._loop_site(node, ()), self._expressions.visit(node.iter)
        parts, after = self._loop_parts(node, ()), self._branch(rest, node, is_tail=True)
        ending = [] if always_exits(node.orelse) else [locate(_Continuation(make_call(make_name(after))), node)]
        parts += [self._branch([*node.orelse, *ending], node, is_tail=True), after]
        call = make_call(site, "run_for", iterable, *map(make_name, parts))
        return [after, *parts[:-1], locate(ast.Return(call), node)]

    def _loop_site(self, node: ast.For, merged: tuple[str, ...]) -> ast.expr:
        obstacles = self._find_obstacles([*node.body, *node.orelse], [node], is_exit=True)
        return self._make_site(SiteDescription("for", node.lineno, merged, tuple(self._assigned), obstacles=obstacles))

    def _loop_parts(self, node: ast.For, merged: tuple[str, ...]) -> list[ast.FunctionDef]:
        """Return a function that assigns an item to the target, and one that runs the body."""
        assignment = locate(ast.Assign([node.target], make_name(ITEM_NAME)), node.target)
        assign = self._function_of([assignment], find_assigned([node.target]), node, ITEM_NAME)
        name, place = f"{LOOP_PREFIX}{next(self._numbers)}", self._place
        self._place = _Place(name, merged, self._liveness.head[node])
        assigned = find_assigned(node.body)
        body = self._function_of(self._block(node.body, is_tail=True), assigned, node, name)
        self._place = place
        return [assign, body]

    def _site(self, kind: str, node: ast.stmt, assigning: Sequence[ast.AST], live: frozenset[str]) -> ast.expr:
        assigned = find_assigned(assigning)
        merged = tuple(name for name in assigned if name in live)
        statements = [n for n in assigning if isinstance(n, ast.stmt)]
        obstacles = self._find_obstacles(statements, assigning, is_exit=False)
        tested = tuple(find_assigned([node.test])) if isinstance(node, ast.While) else ()
        return self._make_site(SiteDescription(kind, node.lineno, merged, tuple(assigned), tested, obstacles))

    def _find_obstacles(
        self, branches: Sequence[ast.stmt], assigning: Sequence[ast.AST], *, is_exit: bool
    ) -> tuple[str, ...]:
        """Return the statements that no branch of a graph can contain."""
        return (*_find_forbidden(branches), *self._find_outer_writes(assigning, is_exit=is_exit))

    def _find_outer_writes(self, nodes: Sequence[ast.AST], *, is_exit: bool) -> Iterator[str]:
        for node in iter_scope(nodes):
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store | ast.Del):
                if node.id in self._globals:
                    yield f"it assigns the global {node.id} (line {node.lineno})"
                elif node.id in self._nonlocals and is_exit:
                    yield f"it assigns {node.id} of an enclosing function (line {node.lineno})"

    # Generated functions

    def _branch(self, body: Sequence[ast.stmt], node: ast.AST, *, is_tail: bool) -> ast.FunctionDef:
        """Return a function without arguments that runs a block on the variables of this function."""
        assigned = find_assigned(body)  # before the rewrite
        return self._function_of(self._block(body, is_tail=is_tail), assigned, node)

    def _function_of(
        self, rewritten: Sequence[ast.stmt], assigned: Sequence[str], node: ast.AST, argument: str = ""
    ) -> ast.FunctionDef:
        """Return a function that runs rewritten statements, and shares the variables that they assign."""
        self._shared.update(dict.fromkeys(assigned))
        kinds = ((ast.Global, self._globals), (ast.Nonlocal, set(assigned) - self._globals))
        outer = [kind([n for n in assigned if n in names]) for kind, names in kinds if not names.isdisjoint(assigned)]
        arguments = ast.arguments([], [ast.arg(argument)] if argument else [], None, [], [], None, [])
        name, statements = f"{PREFIX}{next(self._numbers)}", [*outer, *(rewritten or [ast.Pass()])]
        return locate(ast.FunctionDef(name, arguments, statements, [], None, None), node)

    def _truth(self, test: ast.expr) -> ast.expr:
        return self._expressions.visit_truth(test)

    def _reject(self, test: ast.expr, kind: str, node: ast.stmt, reason: str) -> ast.expr:
        site = self._make_site(SiteDescription(kind, node.lineno, obstacles=(reason,)))
        return locate(make_call(site, "require_plain", self._truth(test)), test)


def _find_forbidden(body: Sequence[ast.AST]) -> Iterator[str]:
    for node in iter_scope(body):
        if isinstance(node, ast.Try | ast.TryStar):
            yield f"it contains a try (line {node.lineno})"
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print":
            yield f"it calls print (line {node.lineno})"
