"""Size expressions evaluate to the same numbers as in sympy and torch."""

import math
import re
from fractions import Fraction

import pytest
import sympy
import torch
from torch.utils._sympy import functions as f

from clika_ref.core.errors import ModelError
from clika_ref.core.symbols import (
    SYMPY_TO_PYTHON,
    Guard,
    Symbol,
    SymbolSource,
    atom_to_number,
    evaluate,
    expr_to_function,
    is_symbolic,
    make_symbol,
    resolve,
)

N, M = make_symbol("n"), make_symbol("m")
HALF = sympy.Rational(1, 2)


def make_raw_expression(kind: type, *args: sympy.Basic) -> sympy.Basic:
    """Return an expression that sympy does not simplify to another kind."""
    return sympy.Basic.__new__(kind, *args)


CASES = [
    (N + M + 1, lambda n, m: n + m + 1),
    (N * M * 3, lambda n, m: n * m * 3),
    (N - M, lambda n, m: n - m),
    (N**2, lambda n, _: n**2),
    (sympy.Mod(N, 3), lambda n, _: n % 3),
    (sympy.floor(N * HALF), lambda n, _: n // 2),
    (sympy.floor((N - M) * HALF), lambda n, m: (n - m) // 2),
    (sympy.ceiling(N * HALF), lambda n, _: -(-n // 2)),
    (sympy.Abs(N - M), lambda n, m: abs(n - m)),
    (sympy.Max(N, M), max),
    (sympy.Min(N, M), min),
    (sympy.Eq(N, M), lambda n, m: n == m),
    (sympy.Ne(N, M), lambda n, m: n != m),
    (sympy.Lt(N, M), lambda n, m: n < m),
    (sympy.Le(N, M), lambda n, m: n <= m),
    (sympy.Gt(N, M), lambda n, m: n > m),
    (sympy.Ge(N, M), lambda n, m: n >= m),
    (sympy.And(N > 3, M > 3), lambda n, m: n > 3 and m > 3),
    (sympy.Or(N > 3, M > 3), lambda n, m: n > 3 or m > 3),
    (sympy.Not(sympy.And(N > 3, M > 3), evaluate=False), lambda n, m: not (n > 3 and m > 3)),
    (f.FloorDiv(N, 3), lambda n, _: n // 3),
    (f.FloorDiv(N - M, 3), lambda n, m: (n - m) // 3),
    (make_raw_expression(f.CleanDiv, 6 * N, sympy.Integer(2)), lambda n, _: 3 * n),
    (make_raw_expression(f.CeilDiv, N, sympy.Integer(3)), lambda n, _: math.ceil(n / 3)),
    (f.ModularIndexing(N, 2, 3), lambda n, _: n // 2 % 3),
    (f.Mod(N, 3), lambda n, _: n % 3),
    (f.PythonMod(N - M, 3), lambda n, m: (n - m) % 3),
    (f.CeilToInt(f.IntTrueDiv(N, 3)), lambda n, _: math.ceil(n / 3)),
    (f.FloorToInt(f.IntTrueDiv(N - M, 3)), lambda n, m: math.floor((n - m) / 3)),
    (f.TruncToInt(f.IntTrueDiv(N - M, 3)), lambda n, m: math.trunc((n - m) / 3)),
    (f.RoundToInt(f.IntTrueDiv(N, 2)), lambda n, _: round(n / 2)),
    (f.FloatTrueDiv(f.ToFloat(N), 4.0), lambda n, _: n / 4),
    (make_raw_expression(f.PowByNatural, N, sympy.Integer(3)), lambda n, _: n**3),
    (f.FloatPow(f.ToFloat(N), 2.0), lambda n, _: float(n) ** 2),
    (f.OpaqueUnaryFn_sqrt(N), lambda n, _: math.sqrt(n)),
    (f.Max(N, M), max),
    (f.Min(N, M), min),
    (f.Identity(N), lambda n, _: n),
    (f.Where(sympy.Gt(N, M), N + 1, M + 2), lambda n, m: n + 1 if n > m else m + 2),
]


@pytest.mark.parametrize(("expr", "expected"), CASES, ids=lambda c: str(c) if isinstance(c, sympy.Basic) else "")
def test_evaluate_matches_python(expr, expected):
    """An expression has the result of the same Python expression."""
    assert expr.free_symbols, "folded before it was tested"
    for n, m in ((0, 5), (1, 1), (2, 7), (5, 2), (6, 6), (17, 16)):
        result = evaluate(expr, {"n": n, "m": m})
        assert result == expected(n, m), (n, m)


def test_evaluate_cases_cover_every_function():
    """The cases cover every supported function."""
    seen = {kind for expr, _ in CASES for part in sympy.preorder_traversal(expr) for kind in type(part).__mro__}
    assert set(SYMPY_TO_PYTHON) <= seen


def test_evaluate_integers_stay_exact():
    """Integers of any size stay exact."""
    result = evaluate((N * M) ** 2 + 1, {"n": 2**40, "m": 3})
    assert result == 9 * 2**80 + 1
    assert type(result) is int


def test_evaluate_number_returns_itself():
    """A number evaluates to itself."""
    assert evaluate(5, {}) == 5
    assert evaluate(1.5, {}) == 1.5


def test_evaluate_missing_symbol_raises_key_error():
    """A symbol without a number raises a KeyError."""
    with pytest.raises(KeyError, match="m"):
        evaluate(N + M, {"n": 1})


@pytest.mark.parametrize(
    ("atom", "expected"),
    [
        (sympy.Integer(3), 3),
        (sympy.Rational(1, 3), Fraction(1, 3)),
        (sympy.Float(0.5), 0.5),
        (sympy.true, True),
        (sympy.false, False),
        (sympy.oo, math.inf),
        (f.int_oo, math.inf),
        (sympy.pi, math.pi),
    ],
)
def test_atom_to_number_returns_python_number(atom, expected):
    """Each atom of sympy becomes a Python number of the matching type."""
    assert atom_to_number(atom) == expected
    assert type(atom_to_number(atom)) is type(expected)


def test_expr_to_function_unknown_function_raises():
    """An unsupported function raises an error with its expression."""
    message = "cannot evaluate the size expression sin(n): sin is not supported"
    with pytest.raises(ModelError, match=re.escape(message)):
        expr_to_function(sympy.sin(N))


def test_resolve_evaluates_inside_tuples():
    """Expressions inside tuples are evaluated."""
    assert resolve((1, (N + 1, "same"), None, torch.float16), {"n": 4}) == (1, (5, "same"), None, torch.float16)


def test_is_symbolic_finds_nested_expression():
    """An attribute is symbolic if it contains an expression."""
    assert is_symbolic((1, (2, N)))
    assert not is_symbolic((1, (2, "n")))
    assert is_symbolic(N)
    assert not is_symbolic(())


def test_make_symbol_same_name_same_length_symbol():
    """One name gives one symbol, a non-negative integer."""
    assert make_symbol("n") is N
    assert N.is_integer
    assert N.is_nonnegative


def test_symbol_and_guard_str_readable():
    """The texts of symbols and guards show their bounds and origin."""
    symbol = Symbol("batch", 0, None, SymbolSource("x", 0))
    assert str(symbol) == "batch: 0.. from dim 0 of 'x'"
    assert str(Symbol("length", 2, 512, SymbolSource("length", None))) == "length: 2..512 from length"
    assert str(Guard(N > 4, "model.py:3")) == "n > 4 (from model.py:3)"
    assert str(Guard(N > 4, "")) == "n > 4"
    assert symbol.expr is make_symbol("batch")
