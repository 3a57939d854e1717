"""Symbols of dynamic dims, guards over them, and the evaluation of size expressions."""

# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false, reportPrivateImportUsage=false
# Sympy has no type annotations, and torch does not export its own expressions.

from __future__ import annotations

import math
import operator
from dataclasses import dataclass
from fractions import Fraction
from functools import cache, reduce
from typing import TYPE_CHECKING, Any

import sympy
import torch

from clika_ref.core.errors import ModelError
from clika_ref.torch_internals.symbols import torch_sympy

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


@dataclass(frozen=True, slots=True)
class SymbolSource:
    """The source of a symbol: dim ``dim`` of the value ``name``, or its single element if ``dim`` is None.

    An element ``holds_length`` if it is a length that a body gets as an operand.
    """

    name: str
    dim: int | None
    holds_length: bool = False

    def __str__(self) -> str:
        return self.name if self.dim is None else f"dim {self.dim} of {self.name!r}"


@dataclass(frozen=True, slots=True)
class Symbol:
    """A dynamic size or number ``name`` in ``[low, high]`` (None: unbounded), its ``source``, an ``example``."""

    name: str
    low: int | None
    high: int | None
    source: SymbolSource
    example: int | None = None

    @property
    def expr(self) -> sympy.Symbol:
        """The sympy symbol used in types and attributes."""
        return make_symbol(self.name, is_length=self.source.dim is not None or self.source.holds_length)

    def __str__(self) -> str:
        low, high = ("" if end is None else end for end in (self.low, self.high))
        return f"{self.name}: {low}..{high} from {self.source}"


@dataclass(frozen=True, slots=True)
class Guard:
    """A ``relation`` between sizes that the graph requires; ``line`` is the source line that it comes from."""

    relation: sympy.Basic
    line: str

    def __str__(self) -> str:
        return f"{self.relation} (from {self.line})" if self.line else str(self.relation)


@cache
def make_symbol(name: str, *, is_length: bool = True) -> sympy.Symbol:
    """Return the unique integer sympy symbol ``name``, nonnegative if ``is_length``."""
    return sympy.Symbol(name, integer=True, nonnegative=is_length or None)


def _sum(*xs: Any) -> Any:
    return _as_whole(reduce(operator.add, xs))


def _product(*xs: Any) -> Any:
    return _as_whole(reduce(operator.mul, xs))


def _as_whole(x: Any) -> Any:
    """Return a whole fraction as an integer: sympy divides an even size by 2 with the factor 1/2."""
    return int(x) if isinstance(x, Fraction) and x.denominator == 1 else x


def _maximum(*numbers: Any) -> Any:
    return reduce(torch.sym_max, numbers) if _has_symbol(numbers) else max(numbers)


def _minimum(*numbers: Any) -> Any:
    return reduce(torch.sym_min, numbers) if _has_symbol(numbers) else min(numbers)


def _has_symbol(numbers: tuple[Any, ...]) -> bool:
    """Whether one of the numbers is a size of a trace: ``max`` and ``min`` would compare it, which is a guard."""
    return any(isinstance(number, torch.SymInt) for number in numbers)


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


SYMPY_TO_PYTHON: dict[type, Callable[..., Any]] = {
    sympy.Add: _sum,
    sympy.Mul: _product,
    **dict.fromkeys((sympy.Pow, torch_sympy.PowByNatural, torch_sympy.FloatPow), operator.pow),
    sympy.floor: _floor,
    sympy.ceiling: _ceil,
    sympy.Abs: abs,
    **dict.fromkeys((sympy.Max, torch_sympy.Max), _maximum),
    **dict.fromkeys((sympy.Min, torch_sympy.Min), _minimum),
    **dict.fromkeys((sympy.Mod, torch_sympy.Mod, torch_sympy.PythonMod), operator.mod),
    **dict.fromkeys((torch_sympy.FloorDiv, torch_sympy.CleanDiv), operator.floordiv),
    sympy.Eq: operator.eq,
    sympy.Ne: operator.ne,
    sympy.Lt: operator.lt,
    sympy.Le: operator.le,
    sympy.Gt: operator.gt,
    sympy.Ge: operator.ge,
    sympy.And: _all,
    sympy.Or: _any,
    sympy.Not: operator.not_,
    torch_sympy.CeilDiv: _ceil_div,
    torch_sympy.ModularIndexing: _modular_indexing,
    torch_sympy.CeilToInt: _ceil,
    torch_sympy.FloorToInt: _floor,
    torch_sympy.TruncToInt: int,
    torch_sympy.RoundToInt: round,
    torch_sympy.IntTrueDiv: operator.truediv,
    torch_sympy.FloatTrueDiv: operator.truediv,
    torch_sympy.ToFloat: float,
    torch_sympy.OpaqueUnaryFn_sqrt: math.sqrt,
    torch_sympy.Identity: operator.pos,
    torch_sympy.Where: _where,
}
"""The Python function for each sympy function in an expression, including torch's own."""


def evaluate(expr: Any, sizes: Mapping[str, int]) -> Any:
    """Evaluate ``expr`` exactly, with ``sizes`` as the values of its symbols (100 times faster than sympy's ``subs``).

    Raises:
        KeyError: a symbol has no value.
        ModelError: a function in the expression is not in `SYMPY_TO_PYTHON`.
    """
    if not isinstance(expr, sympy.Basic):
        return expr
    if isinstance(expr, sympy.Symbol):
        return sizes[expr.name]
    if not expr.args:
        return atom_to_number(expr)
    return expr_to_function(expr)(*[evaluate(a, sizes) for a in expr.args])


def resolve(attr: Any, sizes: Mapping[str, int]) -> Any:
    """Replace every expression inside the attribute ``attr`` by its value, with ``sizes`` as the values of its symbols.

    Raises:
        ModelError: as `evaluate`.
    """
    if isinstance(attr, tuple):
        return tuple(resolve(a, sizes) for a in attr)
    return evaluate(attr, sizes)


def is_symbolic(attr: Any) -> bool:
    """Whether an attribute contains a size expression."""
    return any(map(is_symbolic, attr)) if isinstance(attr, tuple) else isinstance(attr, sympy.Basic)


def atom_to_number(atom: sympy.Basic) -> Any:
    """Return the Python number or bool of an atom."""
    if isinstance(atom, sympy.Integer):
        return int(atom)
    if atom in (sympy.true, sympy.false):
        return atom is sympy.true
    if isinstance(atom, sympy.Rational):
        return Fraction(int(atom.p), int(atom.q))
    if atom in (sympy.oo, torch_sympy.int_oo):
        return float("inf")
    return float(atom)  # type: ignore[arg-type]


def expr_to_function(expr: sympy.Basic) -> Callable[..., Any]:
    """Return the Python function that a compound expression applies to its arguments.

    Raises:
        ModelError: `SYMPY_TO_PYTHON` has none.
    """
    for kind in type(expr).__mro__:
        if kind in SYMPY_TO_PYTHON:
            return SYMPY_TO_PYTHON[kind]
    raise ModelError(
        f"cannot evaluate the size expression {expr}: {type(expr).__name__} is not supported. Write this size with + "
        "- * // % min max or round, or make the dim static."
    )
