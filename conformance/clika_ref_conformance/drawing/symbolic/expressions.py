"""Random expressions over sizes and numbers, each in a graph that returns its value."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from random import Random
from typing import Any

import torch

from clika_ref.core.ir import Graph, Node
from clika_ref.core.operators import Operator
from clika_ref.core.symbols import Symbol, SymbolSource, evaluate
from clika_ref.core.types import TensorType
from clika_ref.torch_internals.symbols import torch_sympy
from clika_ref_conformance.cases import CaseRun, GraphCase

FILL_OPERATOR = "full"
"""The operator that converts the value to a tensor."""

EXPRESSION_SYMBOLS = (
    Symbol("n", 0, None, SymbolSource("x", 0)),
    Symbol("m", 0, None, SymbolSource("y", 0)),
    Symbol("k", None, None, SymbolSource("k", None)),
)
"""Two sizes, and a number that may be negative."""

SYMBOL_VALUES = ((3, 5, 2), (7, 4, -3), (1, 1, 1), (6, 9, -7), (2, 3, 0), (0, 5, -1), (5, 0, 4))
"""Values of the symbols in each run, with all signs of the number."""

MAX_DEPTH = 3

Expression = Any
"""A sympy expression; sympy has no type hints."""


def _make_quotient(rounded: Callable[[Expression], Expression]) -> Callable[[Expression, Expression], Expression]:
    """Return a division that is rounded by ``rounded``."""
    return lambda a, b: rounded(torch_sympy.IntTrueDiv(a, b))


BINARY_OPERATIONS: tuple[Callable[[Expression, Expression], Expression], ...] = (
    lambda a, b: a + b,
    lambda a, b: a - b,
    lambda a, b: a * b,
    lambda a, b: a + 2 * b + 5,
    lambda a, b: 3 * a * b,
    lambda a, _: a * a,
    lambda a, _: abs(a),
    torch_sympy.FloorDiv,
    torch_sympy.FloorDiv,
    torch_sympy.PythonMod,
    torch_sympy.PythonMod,
    torch_sympy.Max,
    torch_sympy.Min,
    _make_quotient(torch_sympy.FloorToInt),
    _make_quotient(torch_sympy.CeilToInt),
    _make_quotient(torch_sympy.TruncToInt),
    _make_quotient(torch_sympy.RoundToInt),
)
"""Binary operations on sizes; repeated entries are drawn more often."""


def generate_expression_cases(filler: Operator, seed: str) -> Iterator[GraphCase]:
    """Yield cases endlessly, without duplicate expressions; runs that divide by zero are left out."""
    random = Random(seed)  # noqa: S311 - draws tests, not keys
    seen: set[Expression] = set()
    while True:
        expression = _draw_expression(random, random.randint(1, MAX_DEPTH))
        if expression in seen or not getattr(expression, "free_symbols", ()):
            continue
        seen.add(expression)
        runs = list(_make_runs(expression))
        if runs:
            yield GraphCase(
                f"expression-{len(seen):03}", _build_graph(filler, expression), runs, {"expression": str(expression)}
            )


def _draw_expression(random: Random, depth: int) -> Expression:
    if not depth:
        return random.choice([*(symbol.expr for symbol in EXPRESSION_SYMBOLS), random.choice((-3, -2, 2, 3, 5))])
    operands = [_draw_expression(random, random.randrange(depth)) for _ in range(2)]
    try:
        return random.choice(BINARY_OPERATIONS)(*operands)
    except ZeroDivisionError:
        return operands[0]


def _make_runs(expression: Expression) -> Iterator[CaseRun]:
    for values in SYMBOL_VALUES:
        sizes = dict(zip((symbol.name for symbol in EXPRESSION_SYMBOLS), values, strict=True))
        try:
            evaluate(expression, sizes)
        except ZeroDivisionError:
            continue
        n, m, k = values
        name = ", ".join(itertools.starmap("{}={}".format, sizes.items()))
        yield CaseRun(name, (torch.zeros(n), torch.zeros(m), torch.tensor(k)))


def _build_graph(filler: Operator, expression: Expression) -> Graph:
    graph = Graph("expression")
    for symbol in EXPRESSION_SYMBOLS:
        shape = () if symbol.source.dim is None else (symbol.expr,)
        graph.add_input(TensorType(torch.float32 if shape else torch.int64, shape), symbol.source.name)
        graph.symbols[symbol.name] = symbol
    attrs = {"size": (1,), "fill_value": expression, "dtype": torch.int64, "device": None}
    node = graph.insert(Node(filler, [], attrs), [TensorType(torch.int64, (1,))])
    graph.add_output(node.output)
    return graph
