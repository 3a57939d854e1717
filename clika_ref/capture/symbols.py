"""Translate the symbols and guards of a trace from torch's names to names that users know."""

from __future__ import annotations

import linecache
import re
import traceback
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import sympy
import torch
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from clika_ref.capture.messages import simplify_message
from clika_ref.capture.origins import (
    DYNAMO_DIR,
    MODULE_CALL_FILE,
    PACKAGE_DIR,
    TORCH_DIR,
    format_line,
    is_installed_file,
    is_operator_file,
)
from clika_ref.capture.source_lines import LocatedSLoc
from clika_ref.core.errors import ModelError
from clika_ref.core.guards import is_met
from clika_ref.core.ir import Graph, Value
from clika_ref.core.symbols import Guard, Symbol, SymbolSource, evaluate
from clika_ref.torch_internals.symbols import get_raw_expression, torch_sympy

_USER_LINE = re.compile(r"(.*)# (\S+):(\d+) in ")
"""The format of model lines in Dynamo's guards."""

BITWISE_OPERATORS = {
    torch_sympy.BitwiseFn_bitwise_and: "&",
    torch_sympy.BitwiseFn_bitwise_or: "|",
}
"""Python's operators for PyTorch's bitwise functions of sizes."""

SAMPLED_LENGTHS = (1, 2, 3, 17, 64)
"""Lengths of dims for which expressions are evaluated."""

MAX_COUNTED_SYMBOLS = 3
"""Maximum number of symbols of an expression that is evaluated for all these lengths."""


@dataclass(frozen=True)
class TracedGuard:
    """A guard, and whether running the model on inputs that violate it may show that it does not matter (``testable``).

    Testable guards are raised inside a PyTorch operator instead of by a branch of Python code (these often concern
    memory layout only), come from tracer assumptions about the sizes 0 and 1, or come from branches of PyTorch and
    other installed packages that exclude only these sizes. A branch in the user's own files counts, unless it excludes
    only these sizes, and a tracing input shows that it computes the same.
    """

    guard: Guard
    is_testable: bool
    is_from_body: bool = False
    """Whether Dynamo raised it, which traces the bodies of control flow: only runs of these are evidence."""

    @property
    def excludes_small_sizes(self) -> bool:
        """Whether it excludes only the sizes 0 and 1."""
        return _holds_from_two(self.guard.relation)


class SymbolTable:
    """Translates torch's size expressions; each symbol is named after the first dim that it is read from."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.known_symbols: dict[sympy.Symbol, sympy.Symbol] = {}
        self.derived_guards: list[Guard] = []
        self.ranks: list[Guard] = []
        self._translated: dict[sympy.Basic, Any] = {}
        self._names: set[str] = set()
        """The names of all symbols, also of bodies."""

    def for_body(self, body: Graph) -> SymbolTable:
        """Return a table for a body, which knows all symbols so far; symbols that it declares belong to the body."""
        inner = SymbolTable(body)
        inner.known_symbols, inner._names = dict(self.known_symbols), self._names
        inner.derived_guards, inner.ranks = self.derived_guards, self.ranks
        return inner

    def bind_input(self, value: Value, fake: torch.Tensor) -> None:
        """Declare the symbols in the shape of an input."""
        for dim, size in enumerate(fake.shape):
            if isinstance(size, torch.SymInt):
                self._bind(size, SymbolSource(value.name, dim), first=dim == 0 and fake.dim() > 1)

    def bind_number(self, value: Value, size: torch.SymInt) -> None:
        """Declare the symbol of an integer input."""
        self._bind(size, SymbolSource(value.name, None), first=False)

    def bind_result(self, value: Value, fake: torch.Tensor) -> None:
        """Declare the data-dependent sizes of ``value``; its node determines them."""
        for dim, size in enumerate(fake.shape):
            if isinstance(size, torch.SymInt) and self._is_new(size):
                self._declare_with_replacement(size, SymbolSource(value.name, dim), f"{value.name}_{dim}")

    def bind_element(self, value: Value, number: torch.SymInt) -> None:
        """Declare an integer read from a one-element tensor (``x.item()``, or ``int(x)`` of a float)."""
        expr = number.node.expr
        if expr not in self.known_symbols and not expr.free_symbols <= self.known_symbols.keys():
            self._declare_with_replacement(number, SymbolSource(value.name, None), f"{value.name}_item")

    def _is_new(self, size: torch.SymInt) -> bool:
        symbols = (get_raw_expression(size), size.node.expr)
        return all(isinstance(s, sympy.Symbol) and s not in self.known_symbols for s in symbols)

    def _bind(self, size: torch.SymInt, source: SymbolSource, *, first: bool) -> None:
        raw = get_raw_expression(size)
        hint = (
            source.name if source.dim is None else "batch" if first else f"{source.name}_{source.dim}".replace(".", "_")
        )
        if isinstance(raw, sympy.Symbol) and raw not in self.known_symbols:
            self._declare_with_replacement(size, source, hint)
        else:  # a size that tracing derived from others: read it too, so that the relation is checked
            self._declare(sympy.Dummy(), source, hint)
            self.derived_guards.append(Guard(sympy.Eq(list(self.known_symbols.values())[-1], self.translate(size)), ""))

    def _declare_with_replacement(self, size: torch.SymInt, source: SymbolSource, hint: str) -> None:
        """Declare a symbol, and also the replacement that tracing found to equal it: types use the replacement."""
        raw, settled = get_raw_expression(size), size.node.expr
        self._declare(raw, source, hint)
        if isinstance(settled, sympy.Symbol):
            self.known_symbols.setdefault(settled, self.known_symbols[raw])

    def _declare(self, raw: sympy.Symbol, source: SymbolSource, hint: str) -> None:
        name, count = hint, 1
        while name in self._names:
            name, count = f"{hint}_{count}", count + 1
        self._names.add(name)
        self.graph.symbols[name] = Symbol(name, None if source.dim is None else 0, None, source)
        self.known_symbols[raw] = self.graph.symbols[name].expr
        self._translated.clear()

    def translate(self, size: Any) -> Any:
        """Return a size (number, SymInt or torch expression) as a number or an expression over the graph's symbols."""
        if isinstance(size, torch.SymInt | torch.SymFloat | torch.SymBool):
            size = size.node.expr
        if not isinstance(size, sympy.Basic):
            return size
        known = self._translated.get(size)
        if known is None:
            known = self._translated[size] = _to_int(self._to_known_symbols(size))
        return known

    def _to_known_symbols(self, expr: sympy.Basic) -> sympy.Basic:
        return _replace_choices(_replace_bit_masks(expr.xreplace(self.known_symbols)))

    def require_known(self, item: Any) -> None:
        """Reject an expression over numbers without a symbol: Python computed them from numbers read from tensors.

        Raises:
            ModelError: the expression contains such a number.
        """
        if isinstance(item, sympy.Basic) and not item.free_symbols <= set(self.known_symbols.values()):
            shown = simplify_message(str(item), "number")
            raise ModelError(f"it uses {shown}, a number read from a tensor, as by item(). Use the tensor itself.")

    def guards(self, env: ShapeEnv | None) -> list[TracedGuard]:
        """Return every relation between sizes that the trace relies on."""
        found = [TracedGuard(g, is_testable=False) for g in self.derived_guards]
        found += [TracedGuard(g, is_testable=True) for g in self.ranks]
        for g in env.guards if env is not None else ():
            if g.expr.free_symbols <= self.known_symbols.keys():
                relation = self._to_known_symbols(g.expr)
                if relation not in (sympy.true, True):
                    testable = _is_from_operator(g.sloc) or (
                        _is_from_installed_package(g.sloc) and _holds_from_two(relation)
                    )
                    found.append(
                        TracedGuard(Guard(relation, _format_location(g.sloc)), testable, _is_from_dynamo(g.sloc))
                    )
        found += self._lower_bounds(env, found)
        return list({t.guard.relation: t for t in reversed(found)}.values())[::-1]

    def _lower_bounds(self, env: ShapeEnv | None, found: list[TracedGuard]) -> Iterator[TracedGuard]:
        """Yield assumptions of the tracer without a guard: sizes are not 0, and with some tracers not 1."""
        for raw, symbol in self.known_symbols.items():
            bounds = env.var_to_range.get(raw) if env is not None else None
            if bounds is None or not bounds.lower.is_Integer:
                continue
            own = [t.guard for t in found if t.guard.relation.free_symbols == {symbol} and not t.is_testable]
            # Torch declares its size symbols positive, so sympy decides ``size == 0`` before a guard is raised.
            lowers = {int(bounds.lower), *((1,) if raw.is_positive else ()), *((0,) if raw.is_nonnegative else ())}
            for lower in sorted(lowers - ({0} if symbol.is_nonnegative else set()), reverse=True):
                if all(is_met(guard, {symbol.name: lower - 1}) for guard in own):
                    yield TracedGuard(Guard(sympy.Ge(symbol, lower), ""), is_testable=True)

    def require_not_one(self, fake: torch.Tensor, dims: Iterable[int], line: str) -> None:
        """Record that a call kept dims that it would have dropped at size 1."""
        for dim in dims:
            size = self.translate(fake.shape[dim])
            if isinstance(size, sympy.Basic):
                self.ranks.append(Guard(sympy.Ne(size, 1), line))


def drop_derived_symbols(graph: Graph) -> None:
    """Remove symbols of dims that the types express by other symbols; calls are checked against the types."""
    inputs = {v.name: v for v in graph.inputs}
    meaning: dict[sympy.Symbol, Any] = {}
    for name, symbol in list(graph.symbols.items()):
        value, dim = inputs.get(symbol.source.name), symbol.source.dim
        if value is not None and dim is not None and value.type.shape[dim] != symbol.expr:
            meaning[symbol.expr] = value.type.shape[dim]
            del graph.symbols[name]
    guards = [replace(g, relation=g.relation.xreplace(meaning)) for g in graph.guards]
    graph.guards = [g for g in guards if g.relation != sympy.true]


def _replace_choices(expr: Any) -> Any:
    """Rewrite each choice between two numbers in an expression, such as the number of a bool, as a ``Where``."""
    if not expr.has(sympy.Piecewise):
        return expr
    args = [_replace_choices(arg) for arg in expr.args]
    if isinstance(expr, sympy.Piecewise) and len(args) == 2:
        (chosen, condition), (other, _) = (arg.args for arg in args)
        return torch_sympy.Where(condition, chosen, other)
    return expr.func(*args)


def _replace_bit_masks(expr: Any) -> Any:
    """Rewrite ``n & (2 ** k - 1)`` in an expression as a remainder, and ``n & -(2 ** k)`` as ``n`` minus a remainder.

    Raises:
        ModelError: it contains another bitwise operation, which has no such form.
    """
    if not expr.has(*BITWISE_OPERATORS):
        return expr
    args = [_replace_bit_masks(a) for a in expr.args]
    sign = BITWISE_OPERATORS.get(type(expr))
    if sign is None:
        return expr.func(*args)
    *whole, mask = sorted(args, key=lambda a: isinstance(a, sympy.Integer))
    masked = _apply_bit_mask(whole[0], int(mask)) if sign == "&" and isinstance(mask, sympy.Integer) else None
    if masked is not None:
        return masked
    shown = f" {sign} ".join(f"({a})" if a.args else str(a) for a in args)
    raise ModelError(
        f"it uses {shown} of sizes, but only masks of the lowest bits (n & 1, n & 3, n & 7, ...) and of all others (n "
        "& ~7) are supported. Write it with + - * // % min max."
    )


def _apply_bit_mask(whole: sympy.Basic, mask: int) -> Any:
    """Return ``whole & mask``, or None unless the mask selects the last bits, or all bits before them."""
    if mask >= 0 and not mask & (mask + 1):
        return torch_sympy.PythonMod(whole, sympy.Integer(mask + 1))
    if mask < 0 and not -mask & (-mask - 1):
        return whole - torch_sympy.PythonMod(whole, sympy.Integer(-mask))  # pyright: ignore[reportOperatorIssue]
    return None


def _to_int(expr: sympy.Basic) -> Any:
    return int(expr) if isinstance(expr, sympy.Integer) else expr


def _format_location(sloc: Any) -> str:
    """Return the line of the model or PyTorch that required a guard, never a line of clika-ref (`composites`)."""
    written = _USER_LINE.search(str(sloc.maybe_user_loc or ""))
    if written:
        return format_line(_expand_path(written[2], int(written[3]), written[1].strip()), int(written[3]))
    if isinstance(sloc, LocatedSLoc) and sloc.model is not None:
        return format_line(sloc.model.filename, sloc.model.lineno or 0)
    frame = sloc.framework_loc
    if not isinstance(frame, traceback.FrameSummary):
        return str(frame or "")
    return "" if frame.filename.startswith(PACKAGE_DIR) else format_line(frame.filename, frame.lineno or 0)


def _expand_path(file: str, line: int, text: str) -> str:
    """Return the full path of a file in or next to PyTorch, as Dynamo shortens these; return other paths unchanged."""
    paths = [str(Path(folder, file)) for folder in (TORCH_DIR, Path(TORCH_DIR).parent)]
    return next((path for path in paths if text and linecache.getline(path, line).strip() == text), file)


def _holds_from_two(relation: sympy.Basic) -> bool:
    """Whether a relation on one size holds for every size from 2 on (checked well beyond any constant in it).

    The size may be a product or a quotient of several, such as the number of tokens of an image.
    """
    if not isinstance(relation, sympy.core.relational.Relational):
        return False
    sizes = [term for term in relation.args if not isinstance(term, sympy.Integer)]
    if len(sizes) != 1 or not (isinstance(sizes[0], sympy.Symbol) or _is_a_count(sizes[0])):
        return False
    limit = next(term for term in relation.args if term is not sizes[0])
    return limit in {0, 1, 2} and all(
        relation.func(*(limit if term is limit else length for term in relation.args)) == sympy.true
        for length in map(sympy.Integer, (2, 3, 5))
    )


def _is_a_count(size: sympy.Basic) -> bool:
    """Whether an expression counts something, such as patches: it is not negative, and never falls with a length."""
    names = [str(symbol) for symbol in size.free_symbols]
    if not 0 < len(names) <= MAX_COUNTED_SYMBOLS:
        return False
    calls = [dict(zip(names, lengths, strict=True)) for lengths in product(SAMPLED_LENGTHS, repeat=len(names))]
    counts = [evaluate(size, call) for call in calls]
    longer = [all(b[name] >= a[name] for name in names) for a in calls for b in calls]
    pairs = [(a, b) for a in counts for b in counts]
    grows = all(a <= b for (a, b), is_longer in zip(pairs, longer, strict=True) if is_longer)
    return min(counts) >= 0 and max(counts) > 2 and grows


def _is_from_operator(sloc: Any) -> bool:
    frame = sloc.framework_loc
    return isinstance(frame, traceback.FrameSummary) and is_operator_file(frame.filename)


def _is_from_dynamo(sloc: Any) -> bool:
    frame = sloc.framework_loc
    return isinstance(frame, traceback.FrameSummary) and frame.filename.startswith(DYNAMO_DIR)


def _is_from_installed_package(sloc: Any) -> bool:
    """Whether an installed package raised a guard. Lines named by Dynamo do not count, as it shortens their paths."""
    frame = sloc.framework_loc
    if sloc.maybe_user_loc is not None or not isinstance(frame, traceback.FrameSummary):
        return False
    return is_installed_file(frame.filename) and frame.filename != MODULE_CALL_FILE
