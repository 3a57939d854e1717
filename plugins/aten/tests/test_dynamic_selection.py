"""Selection, reduction and creation with dynamic dims: one artifact, several sizes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from clika_ref_aten import (
    counting,
    creation,
    cumulative,
    embedding,
    indexing,
    reduction,
    scattering,
    sorting,
    spacing,
    variance,
)
from one_operator import run_onnx
from torch.utils._sympy.functions import IntTrueDiv

from clika_ref.core.errors import TargetError
from clika_ref.core.execution import interpret
from clika_ref.core.inference import infer_types
from clika_ref.core.ir import Graph, Node
from clika_ref.core.operators import Operator
from clika_ref.core.symbols import Symbol, SymbolSource, make_symbol, resolve
from clika_ref.core.types import TensorType
from clika_ref.onnx_export.emission import emit

N, M, U = make_symbol("n"), make_symbol("m"), make_symbol("u")
HALF = IntTrueDiv(N, 2)
SIZES = ({"n": 3, "m": 5}, {"n": 1, "m": 2}, {"n": 6, "m": 1})


def floats(*shape: Any) -> TensorType:
    return TensorType(torch.float32, shape)


def bools(*shape: Any) -> TensorType:
    return TensorType(torch.bool, shape)


def ints(*shape: Any) -> TensorType:
    """Indices that are 0, or also -1 where indices may count from the end: valid along every dim."""
    return TensorType(torch.int64, shape)


def build_graph(op: Operator, operands: tuple[Any, ...], attrs: dict[str, Any], types: tuple[TensorType, ...]) -> Graph:
    """Build one call; both symbols are read from an input of their own, so that attributes may use them."""
    graph = Graph(op.name)
    carrier = graph.add_input(floats(N, M), "carrier")
    for dim, symbol in enumerate((N, M)):
        graph.symbols[symbol.name] = Symbol(symbol.name, 0, None, SymbolSource(carrier.name, dim))
    inputs = [graph.add_input(o, "x") if isinstance(o, TensorType) else o for o in operands]
    call = op.call(*inputs, **attrs)
    node = graph.insert(Node(op, call.operands, call.attrs), types or infer_types(op, call.operands, call.attrs))
    for value in node.outputs:
        graph.add_output(value)
    return graph


def make_tensor(type: TensorType, sizes: dict[str, int]) -> torch.Tensor:
    shape, generator = resolve(type.shape, sizes), torch.Generator().manual_seed(0)
    if type.dtype == torch.float32:
        return torch.randn(shape, generator=generator)
    drawn = torch.randint(0, 2, shape, generator=generator)
    return drawn.bool() if type.dtype == torch.bool else -drawn


WRAPPING = ("index", "index_put", "take")
"""Operators whose positions may count from the end."""


CALLS: list[tuple[Operator, tuple[Any, ...], dict[str, Any]]] = [
    (creation.full, (), {"size": (N, 2, M), "fill_value": 1.5}),
    (creation.full, (), {"size": (N * M,), "fill_value": N, "dtype": torch.int64}),
    (creation.fill, (floats(N, M), ints()), {}),
    (creation.arange, (), {"start": -2, "end": N, "step": 2}),
    (creation.arange, (), {"start": N, "end": -2, "step": -3, "dtype": torch.float32}),
    (creation.arange, (), {"start": 0.5, "end": N + 1, "step": 0.3}),
    (creation.arange, (), {"start": N, "end": -N, "step": -1.0, "dtype": torch.int64}),
    (creation.arange, (), {"start": 0, "end": N, "step": M}),
    (creation.arange, (), {"start": N, "end": 0, "step": M - 6}),
    *((creation.arange, (), {"start": HALF, "end": 2 * N, "dtype": d}) for d in (None, torch.int64, torch.int32)),
    (spacing.linspace, (), {"start": -1.0, "end": 1.0, "steps": N}),
    (spacing.linspace, (), {"start": -HALF, "end": 3 * HALF, "steps": 5, "dtype": torch.int64}),
    (spacing.linspace, (), {"start": 0, "end": N - 1, "steps": M}),
    (spacing.linspace, (), {"start": 3, "end": -7, "steps": 2 * N + 1, "dtype": torch.int64}),
    (spacing.linspace, (), {"start": -1.5, "end": 2.5, "steps": M + N, "dtype": torch.int32}),
    (spacing.logspace, (), {"start": 0, "end": 2.5, "steps": N}),
    (creation.eye, (), {"n": N, "m": M}),
    (creation.triu, (bools(2, N, M),), {"diagonal": N - 1}),
    (reduction.sum_, (floats(N, 3, M),), {"dim": (0, 2)}),
    (reduction.amax, (floats(N, 3, M),), {"dim": (0, -1), "keepdim": True}),
    (reduction.aminmax, (floats(N, M),), {"dim": 1}),
    (reduction.logsumexp, (floats(N, M),), {"dim": (1,)}),
    (reduction.all_, (floats(N, M),), {"dim": (0,)}),
    (variance.var, (floats(N, 3, M),), {"dim": (1, 2)}),
    (variance.std_mean, (floats(N, M, 2),), {"correction": 0.5}),
    (indexing.index, (floats(N, 4), ints(M)), {}),
    (indexing.index, (floats(4, N, M, 2), None, ints(3, 1), ints(M)), {}),
    (indexing.index, (floats(N, 4, M), ints(3), None, ints(3)), {}),
    (indexing.take, (floats(N, M), ints(4)), {}),
    (indexing.take_along_dim, (floats(N, M), ints(1, 2)), {"dim": 1}),
    (scattering.index_put, (floats(N, 4, M), floats(M), bools(N, 4)), {"accumulate": True}),
    (scattering.index_put, (floats(2, N, M), floats(2, 1, M), None, ints(1)), {}),
    (scattering.index_put, (floats(N, M), floats(M), ints(1)), {}),
    (scattering.index_put, (floats(N, 3, M), floats(5, 3), ints(5), None, ints(5)), {"accumulate": True}),
    (scattering.index_add, (floats(N, M), ints(1), floats(N, 1)), {"dim": 1}),
    (scattering.scatter, (floats(N, M), ints(N, 1), 2.0), {"dim": 1}),
    (scattering.masked_scatter, (floats(N, M), bools(N, 1), floats(N * M)), {}),
    (sorting.sort, (floats(N, M),), {"dim": 1}),
    (sorting.topk, (floats(N, M),), {"k": M}),
    (sorting.median, (floats(N, M),), {"dim": 0}),
    (sorting.flat_median, (floats(N, M),), {}),
    (sorting.argmax, (floats(N, M),), {"keepdim": True}),
    (cumulative.cumsum, (floats(N, M),), {"dim": 1}),
    (cumulative.cummax, (floats(N, 5),), {"dim": 1}),
    (cumulative.diff, (floats(N, M), floats(N, 2), None), {"dim": 1}),
    (counting.histc, (floats(N, M),), {"bins": 4, "min": -1, "max": 1}),
    (
        embedding.embedding_bag,
        (floats(7, 3), TensorType(torch.int64, (N,)), ints(1), None),
        {"mode": embedding.BAG_MEAN},
    ),
]

FOUND = [
    (indexing.index, (floats(N, M), bools(N, M)), {}, (floats(U),)),
    (indexing.index, (floats(N, M, 3), None, bools(M)), {}, (floats(N, U, 3),)),
    (counting.nonzero, (floats(N, M),), {}, (ints(U, 2),)),
    (counting.masked_select, (floats(N, M), bools(M)), {}, (floats(U),)),
    (scattering.index_put, (floats(N, M), 2.0, bools(N), ints()), {}, ()),
]


@pytest.mark.parametrize(("op", "operands", "attrs"), CALLS, ids=lambda part: getattr(part, "name", ""))
def test_selection_one_artifact_serves_all_sizes(op, operands, attrs):
    """One artifact computes eager's results at all sizes."""
    compare(build_graph(op, operands, attrs, ()))


@pytest.mark.parametrize(("op", "operands", "attrs", "types"), FOUND, ids=lambda part: getattr(part, "name", ""))
def test_selection_data_dependent_size_found_at_run_time(op, operands, attrs, types):
    """Sizes that depend on data are found at run time."""
    compare(build_graph(op, operands, attrs, types), typed=not types)


def compare(graph: Graph, *, typed: bool = True) -> None:
    """Compare interpreter, ONNX Runtime and the types of the graph, at several sizes."""
    for sizes in SIZES:
        tensors = [make_tensor(value.type, sizes) for value in graph.inputs]
        if graph.name not in WRAPPING:
            tensors = [torch.zeros_like(t) if t.dtype == torch.int64 else t for t in tensors]
        expected, _ = interpret(graph, tensors)
        actual = run_onnx(graph, tensors)
        for value, e, a in zip(graph.outputs, expected, actual, strict=True):
            assert (a.dtype, a.shape) == (e.dtype, e.shape), sizes
            assert not typed or tuple(e.shape) == resolve(value.type.shape, sizes), sizes
            # 1e-6: some ulp of elements of order 1; what matters here is which elements meet.
            assert torch.allclose(a.double(), e.double(), rtol=1e-6, atol=1e-6, equal_nan=True), sizes


@pytest.mark.parametrize(("start", "end", "step"), [(M - 1, -1, -1), (-1, -M - 1, -1), (0, M, 2)], ids=str)
def test_index_reversed_arange_not_fused_to_slice(start, end, step):
    """Indices counted from the end are not fused into a Slice with another end."""
    graph = Graph("reversed")
    x = graph.add_input(floats(N, M), "x")
    graph.symbols = {s.name: Symbol(s.name, 0, None, SymbolSource("x", dim)) for dim, s in enumerate((N, M))}
    attrs = creation.arange.call(start=start, end=end, step=step).attrs
    (places,) = graph.insert(Node(creation.arange, (), attrs), infer_types(creation.arange, (), attrs)).outputs
    found = graph.insert(Node(indexing.index, (x, None, places), {}), [floats(N, places.type.shape[0])])
    graph.add_output(found.output)
    compare(graph)


def test_cumprod_dynamic_length_raises():
    """A cumulative product needs a known length."""
    graph = build_graph(cumulative.cumprod, (floats(N, M),), {"dim": 1}, ())
    with pytest.raises(TargetError, match=r"operator along the dynamic dim m: ONNX has no form for it. Give the dim"):
        emit(graph)
