"""ATen's forms of reshaping, slicing and joining compute the same as the operators they become, for every size."""

from __future__ import annotations

from typing import Any

import onnx
import onnx_ir as ir
import pytest
import torch
from clika_ref_aten.plugin import clika_ref_operators
from one_operator import run_onnx
from torch.utils._sympy.functions import FloorDiv

from clika_ref.core.errors import ModelError
from clika_ref.core.execution import interpret
from clika_ref.core.inference import infer_types
from clika_ref.core.ir import Graph, Node
from clika_ref.core.operators import index_by_overload
from clika_ref.core.symbols import Symbol, SymbolSource, evaluate, make_symbol, resolve
from clika_ref.core.types import TensorType
from clika_ref.onnx_export.emission import emit

aten = torch.ops.aten
OPERATORS = index_by_overload(clika_ref_operators())
n, m = make_symbol("n"), make_symbol("m")
HALF = FloorDiv(n, 2)
FAR = torch.iinfo(torch.int64).max
SIZES = ({"n": 6, "m": 3}, {"n": 9, "m": 1}, {"n": 4, "m": 5})

CALLS: list[tuple[Any, list[tuple[Any, ...]], tuple[Any, ...]]] = [
    (aten.view.default, [(m, n, 12)], ((m, -1, 3, 4),)),
    (aten.view.default, [(m, n, 12)], ((-1, 12),)),
    (aten.view.default, [(m, n, 12)], ((m, -1),)),
    (aten.reshape.default, [(m, n, 12)], ((m * n, 3, -1),)),
    (aten.reshape.default, [(m, n, 2)], ((-1, n),)),
    (aten.reshape.default, [()], ((1, -1),)),
    (aten.view_as.default, [(m, n), (n, m)], ()),
    (aten.flatten.using_ints, [(m, 3, n, 4)], (1,)),
    (aten.flatten.using_ints, [(m, n, 4)], (-2, -1)),
    (aten.flatten.using_ints, [()], ()),
    (aten.unflatten.int, [(m, 12, n)], (-2, (2, -1))),
    (aten.ravel.default, [(m, n)], ()),
    (aten.atleast_1d.default, [()], ()),
    (aten.atleast_2d.default, [(n,)], ()),
    (aten.atleast_3d.default, [(n,)], ()),
    (aten.atleast_3d.default, [(m, n)], ()),
    (aten.squeeze.default, [(n, 1, 3, 1)], ()),
    (aten.squeeze.dim, [(n, 1, 3, 1)], (-1,)),
    (aten.squeeze.dim, [(n, 1)], (0,)),
    (aten.squeeze.dims, [(n, 1, 3, 1)], ((1, 2, -1),)),
    (aten.squeeze.dim, [()], (0,)),
    (aten.unsqueeze.default, [(n, 3)], (-1,)),
    (aten.transpose.int, [(n, 3, m)], (-1, 0)),
    (aten.transpose.int, [()], (0, -1)),
    (aten.swapaxes.default, [(n, m)], (0, 1)),
    (aten.t.default, [(n, m)], ()),
    (aten.t.default, [(n,)], ()),
    (aten.mT.default, [(2, n, m)], ()),
    (aten.numpy_T.default, [(2, n, m)], ()),
    (aten.movedim.int, [(2, n, m)], (0, -1)),
    (aten.movedim.intlist, [(2, n, m, 3)], ((0, 1), (-1, 1))),
    (aten.expand.default, [(m, 1, n)], ((2, m, 3, -1),)),
    (aten.expand_as.default, [(1, n), (m, n)], ()),
    (aten.repeat.default, [(1, n)], ((n, 1),)),
    (aten.tile.default, [(m, n)], ((2,),)),
    (aten.repeat_interleave.self_int, [(m, n)], (2, 1)),
    (aten.repeat_interleave.self_int, [(m, n)], (HALF,)),
    (aten.roll.default, [(m, n)], ((-7,), (1,))),
    (aten.roll.default, [(m, n)], ((3,),)),
    (aten.roll.default, [(m, n)], ((HALF,), (-1,))),
    (aten.fliplr.default, [(m, n)], ()),
    (aten.rot90.default, [(m, n)], (3, (0, 1))),
    (aten.diagonal.default, [(m, 2, n)], (1, 0, -1)),
    (aten.diagonal.default, [(m, n)], (-1,)),
    (aten.linalg_diagonal.default, [(2, m, n)], ()),
    (aten.diagonal_scatter.default, [(n, n), (n,)], ()),
    (aten.diag_embed.default, [(m, n)], (-2, 0, 2)),
    (aten.diag.default, [(n,)], (1,)),
    (aten.unfold.default, [(m, n, 3)], (1, 2, 2)),
    (aten.unfold.default, [(m, n, 3)], (-2, 3, 1)),
    (aten.as_strided.default, [(m, n)], ((m, n - 1), (n, 1), 1)),
    (aten.slice.Tensor, [(m, n)], (1, 1, FAR)),
    (aten.slice.Tensor, [(m, n)], (1, -5, 20, 2)),
    (aten.slice.Tensor, [(m, n)], (-1, 2, -1)),
    (aten.slice.Tensor, [(m, n)], (1, None, HALF)),
    (aten.slice.Tensor, [(m, n)], (1, n - 3)),
    (aten.slice.Tensor, [(m, n)], (1, 8)),
    (aten.slice_scatter.default, [(m, n), (m, 2)], (1, -3, -1)),
    (aten.slice_scatter.default, [(m, n), (m, HALF)], (1, HALF, HALF * 2)),
    (aten.slice_scatter.default, [(m, n), (m, FloorDiv(n + 1, 2))], (1, 0, FAR, 2)),
    (aten.narrow.default, [(m, n)], (1, -3, 2)),
    (aten.narrow.default, [(m, n)], (1, n - 2, 2)),
    (aten.select.int, [(m, n)], (1, -1)),
    (aten.select.int, [(m, n)], (-1, n - 1)),
    (aten.select_scatter.default, [(m, n), (m,)], (1, -1)),
    (aten.select_scatter.default, [(m, n), (m,)], (1, n - 1)),
    (aten.unbind.int, [(m, 3, n)], (1,)),
    (aten.split.Tensor, [(m, 7)], (3, -1)),
    (aten.split.Tensor, [(m, n)], (n, 1)),
    (aten.split.sizes, [(m, n)], ((n - 1, 1), 1)),
    (aten.chunk.default, [(m, 7)], (4, 1)),
    (aten.chunk.default, [(m, 5)], (4, 1)),
    (aten.chunk.default, [(n, 2)], (2,)),
    (aten.chunk.default, [(n, n * 3)], (3, 1)),
    (aten.tensor_split.sections, [(m, n)], (3, 1)),
    (aten.tensor_split.indices, [(m, 7)], ((2, -3, 9), 1)),
    (aten.tensor_split.indices, [(m, n)], ((2,), 1)),
    (aten.hsplit.int, [(n,)], (1,)),
    (aten.dsplit.array, [(m, 2, 5)], ((1, 3),)),
    (aten.pad.default, [(m, n)], ((1, 2, -1, 1),)),
    (aten.pad.default, [(m, n)], ((0, 9 - n), "constant", 2.0)),
    (aten.pad.default, [(m, n)], ((0, -HALF), "constant")),
    (aten.pad.default, [(m, 2, n)], ((HALF, -1), "reflect")),
    (aten.pad.default, [(m, 2, n)], ((-2, HALF), "circular")),
    (aten.constant_pad_nd.default, [(m, n)], ((1, HALF), 3)),
    (aten.reflection_pad2d.default, [(m, n, 4)], ((1, 2, 3, 0),)),
    (aten.replication_pad1d.default, [(m, n)], ((1, 2),)),
]


def build_call_graph(overload: Any, shapes: list[tuple[Any, ...]], args: tuple[Any, ...]) -> Graph:
    graph = Graph("call")
    for i, shape in enumerate(shapes):
        x = graph.add_input(TensorType(torch.float32, shape), f"x{i}")
        for d, side in enumerate(shape):
            if side in (n, m):
                graph.symbols.setdefault(str(side), Symbol(str(side), 0, None, SymbolSource(x.name, d)))
    op = OPERATORS[overload]
    call = op.converters[overload](*graph.inputs, *args)
    node = graph.insert(Node(op, call.operands, call.attrs), infer_types(op, call.operands, call.attrs))
    for value in node.outputs:
        graph.add_output(value)
    return graph


def format_call(call: tuple[Any, ...]) -> str:
    overload, shapes, args = call
    return f"{overload}({shapes}, {args})".replace("aten.", "").replace(" ", "")


@pytest.mark.parametrize("call", CALLS, ids=format_call)
def test_converted_view_call_equals_aten_at_each_size(call):
    """A converted call equals ATen's at every size."""
    overload, shapes, args = call
    graph = build_call_graph(overload, shapes, args)
    for sizes in SIZES:
        inputs = [torch.randn([evaluate(side, sizes) for side in shape]) for shape in shapes]
        expected = overload(*inputs, *resolve(args, sizes))
        expected = [expected] if isinstance(expected, torch.Tensor) else list(expected)
        for where, found in (("interpreted", interpret(graph, inputs)[0]), ("ONNX", run_onnx(graph, inputs))):
            for value, e, f in zip(graph.outputs, expected, found, strict=True):
                assert tuple(evaluate(side, sizes) for side in value.type.shape) == tuple(e.shape), f"{sizes}: {graph}"
                assert torch.equal(e, f), f"{where}, {sizes}: {f} instead of {e}\n{graph}"


@pytest.mark.parametrize(
    ("overload", "shapes", "args", "message"),
    [
        (aten.split.Tensor, [(n,)], (2,), "the number of pieces.*is dynamic"),
        (aten.tensor_split.indices, [(7,)], ((4, 2),), "the indices are not increasing"),
    ],
)
def test_converted_impossible_split_raises(overload, shapes, args, message):
    """A call that no graph can express raises."""
    with pytest.raises(ModelError, match=message):
        build_call_graph(overload, shapes, args)


def test_converted_adjoint_of_complex_raises():
    """The adjoint of complex tensors raises."""
    x = Graph("complex").add_input(TensorType(torch.complex64, (2, 2)), "x")
    with pytest.raises(ModelError, match="conjugates, but complex tensors are not supported"):
        OPERATORS[aten.adjoint.default].converters[aten.adjoint.default](x)


def test_expand_bfloat16_casts_for_runtime():
    """BF16 is expanded in a dtype that runtimes support."""
    graph = Graph("stretched")
    x = graph.add_input(TensorType(torch.bfloat16, (1, 3)), "x")
    op = next(o for o in clika_ref_operators() if o.name == "expand")
    graph.add_output(graph.insert(Node(op, (x,), {"size": (2, 3)}), infer_types(op, (x,), {"size": (2, 3)})).output)
    kinds = [node.op_type for node in emit(graph).graph]
    assert kinds == ["Cast", "Expand", "Cast"]


@pytest.mark.parametrize(
    ("name", "attrs"), [("topk", {"k": 2}), ("sort", {}), ("median", {"dim": 0}), ("flat_median", {})]
)
def test_sort_bfloat16_casts_for_onnx(name, attrs):
    """BF16 is sorted in a dtype that ONNX supports."""
    graph = Graph("ordered")
    x = graph.add_input(TensorType(torch.bfloat16, (4, 3)), "x")
    op = next(o for o in clika_ref_operators() if o.name == name)
    call = op.call(x, **attrs)
    for value in graph.insert(Node(op, call.operands, call.attrs), infer_types(op, call.operands, call.attrs)).outputs:
        graph.add_output(value)
    onnx.checker.check_model(ir.to_proto(emit(graph)), full_check=True)


def test_slice_to_last_of_empty_has_size_0():
    """A slice up to the last element of an empty dim is empty."""
    (op,) = (o for o in clika_ref_operators() if o.name == "slice")
    x = Graph("sliced").add_input(TensorType(torch.float32, (n,)), "x")
    for start in (None, 0):
        (found,) = infer_types(op, (x,), {"dim": 0, "start": start, "end": n - 1, "step": 1})
        assert [evaluate(found.shape[0], {"n": length}) for length in (0, 1, 5)] == [0, 0, 4]
