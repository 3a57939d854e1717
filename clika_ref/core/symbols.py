"""Symbols of dynamic sides, guards over them, and the evaluation of the expressions that they occur in."""

# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false, reportPrivateImportUsage=false
# Sympy states no types, and torch does not export its own expressions.

from __future__ import annotations

import math
import operator
from dataclasses import dataclass
from fractions import Fraction
from functools import cache, reduce
from typing import TYPE_CHECKING, Any

import sympy
from torch.utils._sympy import functions as torch_sympy

from clika_ref.core.errors import ModelError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


@dataclass(frozen=True, slots=True)
class Side:
    """What a symbol is read from: side ``dim`` of the value ``name``, or its element where ``dim`` is None."""

    name: str
    dim: int | None

    def __str__(self) -> str:
        return self.name if self.dim is None else f"side {self.dim} of {self.name!r}"


@dataclass(frozen=True, slots=True)
class Symbol:
    """A length or number with a ``name``: its range, ``low`` to ``high`` (None: no end), its side, an example of it."""

    name: str
    low: int | None
    high: int | None
    side: Side
    example: int | None = None

    @property
    def expr(self) -> sympy.Symbol:
        """The sympy symbol that stands for it in types and attributes."""
        return named(self.name, is_length=self.side.dim is not None)

    def __str__(self) -> str:
        low, high = ("" if end is None else end for end in (self.low, self.high))
        return f"{self.name}: {low}..{high} from {self.side}"


@dataclass(frozen=True, slots=True)
class Guard:
    """A relation that sizes must satisfy for the graph to mean what the model means, and the line that asked."""

    relation: sympy.Basic
    line: str

    def __str__(self) -> str:
        return f"{self.relation} (from {self.line})" if self.line else str(self.relation)


@cache
def named(name: str, *, is_length: bool = True) -> sympy.Symbol:
    """Return the one sympy symbol of that name, an integer: where ``is_length``, it is not negative."""
    return sympy.Symbol(name, integer=True, nonnegative=is_length or None)


def _sum(*xs: Any) -> Any:
    return reduce(operator.add, xs)


def _product(*xs: Any) -> Any:
    return reduce(operator.mul, xs)


def _floor(x: Any) -> int:
    return int(x // 1)


def _ceil(x: Any) -> int:
    return -int(-x // 1)


def _ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def _modular_indexing(x: int, divisor: int, modulus: int) -> int:
    return x // divisor % modulus


def _all(*xs: Any) -> bool:
    return all(xs)


def _any(*xs: Any) -> bool:
    return any(xs)


def _where(condition: Any, a: Any, b: Any) -> Any:
    return a if condition else b


FUNCTIONS: dict[type, Callable[..., Any]] = {
    sympy.Add: _sum,
    sympy.Mul: _product,
    sympy.Pow: operator.pow,
    sympy.Mod: operator.mod,
    sympy.floor: _floor,
    sympy.ceiling: _ceil,
    sympy.Abs: abs,
    sympy.Max: max,
    sympy.Min: min,
    sympy.Eq: operator.eq,
    sympy.Ne: operator.ne,
    sympy.Lt: operator.lt,
    sympy.Le: operator.le,
    sympy.Gt: operator.gt,
    sympy.Ge: operator.ge,
    sympy.And: _all,
    sympy.Or: _any,
    sympy.Not: operator.not_,
    torch_sympy.FloorDiv: operator.floordiv,
    torch_sympy.CleanDiv: operator.floordiv,
    torch_sympy.CeilDiv: _ceil_div,
    torch_sympy.ModularIndexing: _modular_indexing,
    torch_sympy.Mod: operator.mod,
    torch_sympy.PythonMod: operator.mod,
    torch_sympy.CeilToInt: _ceil,
    torch_sympy.FloorToInt: _floor,
    torch_sympy.TruncToInt: int,
    torch_sympy.RoundToInt: round,
    torch_sympy.IntTrueDiv: operator.truediv,
    torch_sympy.FloatTrueDiv: operator.truediv,
    torch_sympy.ToFloat: float,
    torch_sympy.PowByNatural: operator.pow,
    torch_sympy.FloatPow: operator.pow,
    torch_sympy.OpaqueUnaryFn_sqrt: math.sqrt,
    torch_sympy.Max: max,
    torch_sympy.Min: min,
    torch_sympy.Identity: operator.pos,
    torch_sympy.Where: _where,
}
"""What each function of an expression means on Python numbers; torch's own nodes included."""


def evaluate(expr: Any, sizes: Mapping[str, int]) -> Any:
    """Compute ``expr`` from ``sizes``, what its symbols stand for, exactly (sympy's own ``subs`` is 100 times slower).

    Raises:
        KeyError: a symbol has no value.
        ModelError: a function in it has no known meaning.
    """
    if not isinstance(expr, sympy.Basic):
        return expr
    if isinstance(expr, sympy.Symbol):
        return sizes[expr.name]
    if not expr.args:
        return number(expr)
    return meaning(expr)(*[evaluate(a, sizes) for a in expr.args])


def resolve(attr: Any, sizes: Mapping[str, int]) -> Any:
    """Replace every expression inside an attribute ``attr`` by its value, where symbols stand for ``sizes``.

    Raises:
        ModelError: as `evaluate`.
    """
    if isinstance(attr, tuple):
        return tuple(resolve(a, sizes) for a in attr)
    return evaluate(attr, sizes)


def is_symbolic(attr: Any) -> bool:
    """Whether an attribute holds an expression."""
    return any(map(is_symbolic, attr)) if isinstance(attr, tuple) else isinstance(attr, sympy.Basic)


def number(atom: sympy.Basic) -> Any:
    """Return the Python number (or truth value) that an atom stands for."""
    if isinstance(atom, sympy.Integer):
        return int(atom)
    if atom in (sympy.true, sympy.false):
        return atom is sympy.true
    if isinstance(atom, sympy.Rational):
        return Fraction(int(atom.p), int(atom.q))
    if atom in (sympy.oo, torch_sympy.int_oo):
        return float("inf")
    return float(atom)  # type: ignore[arg-type]


def meaning(expr: sympy.Basic) -> Callable[..., Any]:
    """Return the Python function that a compound expression applies to its arguments.

    Raises:
        ModelError: none is declared in `FUNCTIONS`.
    """
    for kind in type(expr).__mro__:
        if kind in FUNCTIONS:
            return FUNCTIONS[kind]
    msg = (
        f"no meaning is declared for {type(expr).__name__} in the size expression {expr}; "
        "write this size with + - * // % min max or round, or make the side static"
    )
    raise ModelError(msg)
