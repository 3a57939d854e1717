"""Size expressions as ONNX nodes compute the same as in Python."""

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import sympy
import torch
from onnx.reference import ReferenceEvaluator
from torch.utils._sympy import functions as torch_sympy

from clika_ref.core.errors import ModelError
from clika_ref.core.symbols import Symbol, SymbolSource, evaluate, make_symbol
from clika_ref.core.types import TensorType
from clika_ref.onnx_export.builder import OPSET, OnnxBuilder

A, B = make_symbol("a"), make_symbol("b")

EXPRESSIONS = [
    A + B + 3,
    A - B,
    2 * A * B,
    torch_sympy.FloorDiv(A, 4),
    torch_sympy.FloorDiv(A - B, 4),
    torch_sympy.FloorDiv(B - A - 1, 3),
    torch_sympy.FloorDiv(A, B - 9),
    torch_sympy.Mod(A, 4),
    torch_sympy.PythonMod(B - A, 4),
    torch_sympy.Max(A, B, 5),
    torch_sympy.Min(A, 2 * B),
    sympy.Max(1, A - 7),
    torch_sympy.PowByNatural(A, sympy.Integer(2)),
    torch_sympy.CeilDiv(A, sympy.Integer(3)),
    torch_sympy.FloorToInt(torch_sympy.IntTrueDiv(A, sympy.Integer(3))),
    torch_sympy.CeilToInt(torch_sympy.IntTrueDiv(A, B)),
    torch_sympy.TruncToInt(torch_sympy.ToFloat(A) * 1.5),
    torch_sympy.RoundToInt(torch_sympy.ToFloat(A) * 0.5),
    sympy.Eq(torch_sympy.Mod(A, 2), 0),
    sympy.Ne(A, 7),
    A < 7,
    A <= 7,
    A > B,
    A >= B,
    sympy.And(A > 2, B < 7),
    sympy.Or(A > 7, B > 5),
    sympy.Not(sympy.And(A > 1, B > 2), evaluate=False),
    sympy.Gt(torch_sympy.IntTrueDiv(A, sympy.Integer(2)), B),
]


def emit_sizes(*sides):
    """Return a function that computes dims in ONNX from the sizes of an input x[a, b]."""
    op = OnnxBuilder()
    x = ir.Value(name="x", type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape(["a", "b"]))
    op.declare(x, TensorType(torch.float32, (A, B)))
    for dim, name in enumerate("ab"):
        op.sizes.bind(Symbol(name, 0, None, SymbolSource("x", dim)), x)
    result = op.Identity(op.ints(sides))
    result.name = "sides"
    result.type, result.shape = ir.TensorType(ir.DataType.INT64), ir.Shape([len(sides)])
    graph = ir.Graph(
        [x], [result], nodes=op.nodes, initializers=list(op.initializers.values()), opset_imports={"": OPSET}, name="g"
    )
    proto = ir.to_proto(ir.Model(graph, ir_version=10))
    onnx.checker.check_model(proto)
    session = ReferenceEvaluator(proto)
    return op, lambda a, b: session.run(None, {"x": np.zeros((a, b), np.float32)})[0].tolist()


@pytest.mark.parametrize("expr", EXPRESSIONS, ids=str)
def test_onnx_builder_size_expression_matches_python(expr):
    """A size expression has the same value in ONNX and in Python."""
    _, run = emit_sizes(expr)
    for a, b in [(1, 1), (2, 7), (7, 2), (8, 5), (13, 3)]:
        assert run(a, b) == [int(evaluate(expr, {"a": a, "b": b}))]


def test_onnx_builder_ints_mix_numbers_and_expressions():
    """Numbers and expressions are combined in one vector."""
    _, run = emit_sizes(2, A, 3, 4, A * B, B)
    assert run(5, 6) == [2, 5, 3, 4, 30, 6]


def test_onnx_builder_equal_size_expressions_computed_once():
    """Equal size expressions share their nodes."""
    op, _ = emit_sizes(A * B, A * B + 1, A * B)
    assert [n.op_type for n in op.nodes].count("Mul") == 1
    assert [n.op_type for n in op.nodes].count("Shape") == 2


def test_onnx_builder_symbol_without_source_raises():
    """A symbol without a source raises an error that names it."""
    with pytest.raises(ModelError, match="symbol c: it is used before"):
        emit_sizes(make_symbol("c") + 1)


def test_may_be_zero_follows_symbol_ranges():
    """A size may be zero only if the ranges of its symbols allow it."""
    op = OnnxBuilder()
    x = ir.Value(name="x")
    op.sizes.bind(Symbol("a", 0, None, SymbolSource("x", 0)), x)
    op.sizes.bind(Symbol("b", 2, None, SymbolSource("x", 1)), x)
    assert [size for size in (0, A, 3 * A, A * B, B - 2) if not op.sizes.may_be_zero(size)] == []
    assert [size for size in (5, A + 1, B, 3 * B, B - 1, B * (A + 1)) if op.sizes.may_be_zero(size)] == []
