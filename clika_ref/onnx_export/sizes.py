"""Emit size expressions as ONNX nodes; each expression is computed once, from the dims of its symbols."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import sympy
import torch

from clika_ref.core.errors import ModelError
from clika_ref.core.symbols import atom_to_number, is_symbolic
from clika_ref.torch_internals.symbols import torch_sympy

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import onnx_ir as ir

    from clika_ref.core.symbols import Symbol


class SizeEmitter:
    """Emits size expressions as tensors of shape [1]: int64, float64 for fractions, bool for comparisons.

    ``op`` is the ONNX builder that nodes and constants are added to.
    """

    def __init__(self, op: Any) -> None:
        self.op = op
        self._sources: dict[sympy.Basic, tuple[ir.Value, int | None]] = {}
        self._in_range: dict[sympy.Basic, sympy.Basic] = {}
        self._vectors: dict[Any, ir.Value] = {}
        self._scalars: dict[Any, ir.Value] = {}

    def bind(self, symbol: Symbol, source: ir.Value) -> None:
        """Declare the value that carries a symbol; it is read at the first expression that needs it."""
        self._sources[symbol.expr] = (source, symbol.source.dim)
        lowest = symbol.low
        anything = sympy.Dummy(integer=True, nonnegative=lowest is not None or None)
        self._in_range[symbol.expr] = anything + (lowest or 0)

    def has_source(self, symbol: Symbol) -> bool:
        """Return whether a value that carries the symbol is known."""
        return symbol.expr in self._sources

    @contextlib.contextmanager
    def inner_scope(self, *, is_closed: bool) -> Iterator[None]:
        """Forget all that is emitted in the context at its end: other nodes cannot read it.

        If the context ``is_closed``, it does not know what was emitted before.
        """
        before = self._sources, self._vectors, self._scalars
        if is_closed:
            self._sources, self._vectors, self._scalars = {}, {}, {}
        else:
            self._sources, self._vectors, self._scalars = map(dict, before)  # type: ignore[assignment]
        try:
            yield
        finally:
            self._sources, self._vectors, self._scalars = before

    def may_be_zero(self, size: Any) -> bool:
        """Whether a size can be 0 within the ranges of its symbols."""
        return not size.xreplace(self._in_range).is_positive if is_symbolic(size) else size == 0

    def vector(self, sizes: tuple[Any, ...]) -> ir.Value:
        """Return int64[n] of numbers and expressions; consecutive numbers form one constant."""
        parts: list[ir.Value] = []
        run: list[int] = []
        for size in sizes:
            if is_symbolic(size):
                if run:
                    parts.append(self.op.ints(run))
                    run = []
                parts.append(self._emit_whole(size))
            else:
                run.append(int(size))
        if run:
            parts.append(self.op.ints(run))
        return parts[0] if len(parts) == 1 else self.op.Concat(*parts, axis=0)

    def _emit_whole(self, expr: sympy.Basic) -> ir.Value:
        """Return a whole number as int64[1]; with a factor such as 1/2 it was computed in float64."""
        value = self.emit_vector(expr)
        return self.op.cast(self.op.Round(value), torch.int64) if self.op.dtype(value) == torch.float64 else value

    def scalar(self, expr: sympy.Basic) -> ir.Value:
        """Return an expression as a 0-d value."""
        if expr not in self._scalars:
            self._scalars[expr] = self.op.Squeeze(self.emit_vector(expr), self.op.ints([0]))
        return self._scalars[expr]

    def emit_vector(self, expr: sympy.Basic) -> ir.Value:
        """Return an expression as a value of shape [1]."""
        if expr not in self._vectors:
            self._vectors[expr] = self._compute(expr)
        return self._vectors[expr]

    def _compute(self, expr: sympy.Basic) -> ir.Value:
        if not expr.args:
            return self._emit_atom(expr)
        for kind, emit in EXPR_RULES.items():
            if isinstance(expr, kind):
                return emit(self, expr)
        raise ModelError(f"cannot export the size expression {expr}: {type(expr).__name__} has no ONNX equivalent")

    def _emit_atom(self, expr: sympy.Basic) -> ir.Value:
        if expr in self._sources:
            source, dim = self._sources[expr]
            if dim is None:
                return self.op.Reshape(self.op.cast(source, torch.int64), self.op.ints([1]))
            return self.op.Shape(source, start=dim, end=dim + 1)
        if isinstance(expr, sympy.Symbol):
            raise ModelError(f"cannot export the symbol {expr}: it is used before its source is computed")
        value = atom_to_number(expr)
        if isinstance(value, bool):
            return self.op.constant([value], torch.bool)
        if isinstance(value, int):
            return self.op.ints([value])
        return self.op.constant([float(value)], torch.float64)

    def _fold(self, op_type: str, expr: sympy.Basic) -> ir.Value:
        first, *rest = self._promote(*expr.args)
        for value in rest:
            first = self.op.node(op_type, first, value)
        return first

    def _promote(self, *args: sympy.Basic) -> list[ir.Value]:
        values = [self.emit_vector(a) for a in args]
        dtypes = {self.op.dtype(v) for v in values}
        if len(dtypes) == 1:
            return values
        wide = torch.float64 if torch.float64 in dtypes else torch.int64  # for bools mixed with numbers
        return [self.op.cast(v, wide) for v in values]

    def _floor_divide(self, expr: sympy.Basic) -> ir.Value:
        a, b = self._promote(*expr.args)
        if not all(arg.is_nonnegative for arg in expr.args):  # ONNX truncates, Python rounds down
            a = self.op.Sub(a, self.op.Mod(a, b))
        return self.op.Div(a, b)

    def _true_divide(self, expr: sympy.Basic) -> ir.Value:
        a, b = (self.op.cast(self.emit_vector(x), torch.float64) for x in expr.args)
        return self.op.Div(a, b)

    def _ceil_divide(self, expr: sympy.Basic) -> ir.Value:
        a, b = expr.args
        quotient: Any = torch_sympy.FloorDiv(-a, b)  # type: ignore[operator]
        return self.emit_vector(-quotient)

    def _modular_index(self, expr: sympy.Basic) -> ir.Value:
        number, divisor, modulus = expr.args
        index: Any = torch_sympy.Mod(torch_sympy.FloorDiv(number, divisor), modulus)
        return self.emit_vector(index)

    def _where(self, expr: sympy.Basic) -> ir.Value:
        condition, *choices = expr.args
        return self.op.Where(self.emit_vector(condition), *self._promote(*choices))

    def _mod(self, expr: sympy.Basic) -> ir.Value:
        return self.op.Mod(*self._promote(*expr.args))

    def _round(self, op_type: str, expr: sympy.Basic) -> ir.Value:
        value = self.op.cast(self.emit_vector(expr.args[0]), torch.float64)
        return self.op.cast(self.op.node(op_type, value), torch.int64)

    def _power(self, expr: sympy.Basic) -> ir.Value:
        base, exponent = expr.args
        if exponent == -1:
            return self.op.Reciprocal(self.op.cast(self.emit_vector(base), torch.float64))
        return self.op.Pow(*self._promote(base, exponent))

    def _to_float(self, expr: sympy.Basic) -> ir.Value:
        return self.op.cast(self.emit_vector(expr.args[0]), torch.float64)

    def _truncate(self, expr: sympy.Basic) -> ir.Value:
        return self.op.cast(self.emit_vector(expr.args[0]), torch.int64)


EXPR_RULES: dict[type, Callable[[SizeEmitter, Any], Any]] = {
    sympy.Add: lambda s, e: s._fold("Add", e),
    sympy.Mul: lambda s, e: s._fold("Mul", e),
    sympy.Pow: SizeEmitter._power,
    torch_sympy.PowByNatural: SizeEmitter._power,
    torch_sympy.FloorDiv: SizeEmitter._floor_divide,
    torch_sympy.CeilDiv: SizeEmitter._ceil_divide,
    torch_sympy.ModularIndexing: SizeEmitter._modular_index,
    torch_sympy.Mod: SizeEmitter._mod,
    torch_sympy.PythonMod: SizeEmitter._mod,
    sympy.Mod: SizeEmitter._mod,
    sympy.Abs: lambda s, e: s.op.Abs(s.emit_vector(e.args[0])),
    torch_sympy.Max: lambda s, e: s._fold("Max", e),
    torch_sympy.Min: lambda s, e: s._fold("Min", e),
    sympy.Max: lambda s, e: s._fold("Max", e),
    sympy.Min: lambda s, e: s._fold("Min", e),
    torch_sympy.IntTrueDiv: SizeEmitter._true_divide,
    torch_sympy.FloatTrueDiv: SizeEmitter._true_divide,
    torch_sympy.ToFloat: SizeEmitter._to_float,
    torch_sympy.FloatPow: lambda s, e: s._fold("Pow", e),
    torch_sympy.OpaqueUnaryFn_sqrt: lambda s, e: s.op.Sqrt(s._to_float(e)),
    torch_sympy.CeilToInt: lambda s, e: s._round("Ceil", e),
    torch_sympy.FloorToInt: lambda s, e: s._round("Floor", e),
    torch_sympy.RoundToInt: lambda s, e: s._round("Round", e),
    torch_sympy.TruncToInt: SizeEmitter._truncate,
    torch_sympy.Identity: lambda s, e: s.emit_vector(e.args[0]),
    torch_sympy.Where: SizeEmitter._where,
    sympy.floor: lambda s, e: s._round("Floor", e),
    sympy.Eq: lambda s, e: s._fold("Equal", e),
    sympy.Ne: lambda s, e: s.op.Not(s._fold("Equal", e)),
    sympy.Lt: lambda s, e: s._fold("Less", e),
    sympy.Le: lambda s, e: s._fold("LessOrEqual", e),
    sympy.Gt: lambda s, e: s._fold("Greater", e),
    sympy.Ge: lambda s, e: s._fold("GreaterOrEqual", e),
    sympy.And: lambda s, e: s._fold("And", e),
    sympy.Or: lambda s, e: s._fold("Or", e),
    sympy.Not: lambda s, e: s.op.Not(s.emit_vector(e.args[0])),
    sympy.ceiling: lambda s, e: s._round("Ceil", e),
}
