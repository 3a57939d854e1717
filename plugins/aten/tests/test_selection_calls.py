"""ATen's forms of selection, reduction, sorting and creation compute the same as the operators they become."""

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
    searching,
    sorting,
    spacing,
    variance,
)
from one_operator import Case, run_onnx, types_of

from clika_ref.capture.callables import make_callable
from clika_ref.capture.capture import capture
from clika_ref.capture.inputs import ModelCall
from clika_ref.core.ir import Graph, Node, Value
from clika_ref.core.operators import Operator, index_by_overload
from clika_ref.core.registry import Plugin, build_registry
from clika_ref.core.types import TensorType

aten = torch.ops.aten
FAMILIES = (
    counting,
    creation,
    cumulative,
    embedding,
    indexing,
    reduction,
    scattering,
    searching,
    sorting,
    spacing,
    variance,
)
OPERATORS = index_by_overload(o for family in FAMILIES for o in vars(family).values() if isinstance(o, Operator))

X = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))
V = X[0].sort()[0]
POSITIVE = X > 0
I = torch.tensor([0, 2, 1])  # noqa: E741 - positions, as ATen's signatures have it
II = torch.tensor([[0, 1], [2, 0]])
PAIR = X[:2, :2]
BAGS = torch.tensor([0, 2])
STORED = {"device": torch.device("cpu"), "pin_memory": False, "layout": torch.strided}
F64, INT = {"dtype": torch.float64}, {"dtype": torch.int64}

Form = tuple[tuple[Any, ...], dict[str, Any]]


def form(*args: Any, **kwargs: Any) -> Form:
    return args, kwargs


OVER_SIDES = [form(X, [1], True), form(X, [], **F64), form(X, None), form(X, [0, -1])]
TRUTH = [form(POSITIVE, [0, 1]), form(POSITIVE, []), form(POSITIVE)]
UNBIASED = [form(X), form(X, False)]
UNBIASED_SIDES = [form(X, [0]), form(X, [1], False, True)]
CORRECTED = [form(X, [0]), form(X), form(X, [0], correction=0, keepdim=True)]
LIKE = [form(I, **STORED), form(X, dtype=torch.bool, memory_format=torch.preserve_format)]

FORMS: dict[Any, list[Form]] = {
    aten.index.Tensor: [form(X, [None, I]), form(X, [I, None]), form(X, [POSITIVE])],
    aten.index_select.default: [form(X, -1, I)],
    aten.gather.default: [form(X, 1, II)],
    aten.take.default: [form(X, II)],
    aten.take_along_dim.default: [form(X, II), form(X, II[:1, :1], 1)],
    aten.masked_select.default: [form(X, POSITIVE)],
    aten.masked_scatter.default: [form(X, POSITIVE, torch.arange(12.0))],
    aten.nonzero.default: [form(POSITIVE)],
    aten.nonzero_numpy.default: [form(POSITIVE)],
    aten.where.default: [form(POSITIVE)],
    aten.argwhere.default: [form(POSITIVE)],
    aten.one_hot.default: [form(I, 3), form(I)],
    aten.index_put.default: [form(X, [I], X + 1, True), form(X, [None, I], X[0, 0])],
    aten._index_put_impl.default: [form(X, [I], X[1], False, False)],
    aten.scatter.src: [form(X, 1, II, PAIR)],
    aten.scatter.value: [form(X, 0, II, 2)],
    aten.scatter.reduce: [form(X, 1, II, PAIR, reduce="add")],
    aten.scatter.value_reduce: [form(X, 1, II, 2.0, reduce="multiply")],
    aten.scatter_add.default: [form(X, 1, II, PAIR)],
    aten.scatter_reduce.two: [form(X, 1, II, PAIR, "amax", include_self=False)],
    aten.index_add.default: [form(X, 1, I, X[:, 1:], alpha=2)],
    aten.index_copy.default: [form(X, 1, I, X[:, 1:])],
    aten.index_fill.int_Scalar: [form(X, -1, I, 7)],
    aten.index_fill.int_Tensor: [form(X, 0, I[:2], X[0, 0])],
    aten.embedding.default: [form(X, II), form(X, II, 0, False, True)],
    aten.embedding_bag.default: [form(X, I, BAGS)],
    aten.embedding_bag.padding_idx: [form(X, I, BAGS, False, 1, False, None, False, 1)],
    aten.sum.default: [form(X), form(X, **F64), form(POSITIVE)],
    aten.sum.dim_IntList: OVER_SIDES,
    aten.mean.default: [form(X), form(X, **F64)],
    aten.mean.dim: OVER_SIDES,
    aten.nansum.default: [form(X), *OVER_SIDES],
    aten.nanmean.default: [form(X), *OVER_SIDES],
    aten.prod.default: [form(X)],
    aten.prod.dim_int: [form(X, 0, True)],
    aten.amax.default: [form(X), form(X, [1])],
    aten.amin.default: [form(X, [0], True)],
    aten.max.default: [form(X)],
    aten.min.default: [form(X)],
    aten.max.dim: [form(X, 0)],
    aten.min.dim: [form(X, -1, True)],
    aten.aminmax.default: [form(X), form(X, dim=0)],
    aten.all.default: [form(POSITIVE)],
    aten.all.dim: [form(POSITIVE, 0), form(POSITIVE, 1, True)],
    aten.all.dims: TRUTH,
    aten.any.default: [form(POSITIVE)],
    aten.any.dim: [form(POSITIVE, 0), form(POSITIVE, 1, True)],
    aten.any.dims: TRUTH,
    aten.argmax.default: [form(X)],
    aten.argmin.default: [form(X, 1, True)],
    aten.logsumexp.default: [form(X, [0])],
    aten.count_nonzero.default: [form(X), form(X, 1)],
    aten.count_nonzero.dim_IntList: [form(X, [0]), form(X, [])],
    aten.var.default: UNBIASED,
    aten.var.dim: UNBIASED_SIDES,
    aten.var.correction: CORRECTED,
    aten.std.default: UNBIASED,
    aten.std.dim: UNBIASED_SIDES,
    aten.std.correction: CORRECTED,
    aten.var_mean.default: UNBIASED,
    aten.var_mean.dim: UNBIASED_SIDES,
    aten.var_mean.correction: CORRECTED,
    aten.std_mean.default: UNBIASED,
    aten.std_mean.dim: UNBIASED_SIDES,
    aten.std_mean.correction: CORRECTED,
    aten.median.default: [form(X)],
    aten.median.dim: [form(X, 1)],
    aten.kthvalue.default: [form(X, 2)],
    aten.histc.default: [form(X, 4), form(X, 3, -1, 2)],
    aten.bincount.default: [form(I), form(I, X[0, :3], 5)],
    aten.cumsum.default: [form(X, 0), form(I, 0, **F64)],
    aten.cumprod.default: [form(X, 1)],
    aten.cummax.default: [form(X, 1)],
    aten.cummin.default: [form(X, 0)],
    aten.logcumsumexp.default: [form(X, 1)],
    aten.diff.default: [form(X), form(X, 1, 0, X, None)],
    aten.topk.default: [form(X, 2), form(X, 1, 0, False, True)],
    aten.sort.default: [form(X), form(X, 0, True)],
    aten.sort.stable: [form(X, stable=None), form(X, stable=True, dim=0)],
    aten.argsort.default: [form(X), form(X, 0, True)],
    aten.argsort.stable: [form(X, stable=True, dim=0, descending=True)],
    aten.msort.default: [form(X)],
    aten.searchsorted.Tensor: [form(V, X, right=True), form(V, X, side="right"), form(V, X, side="left", sorter=None)],
    aten.searchsorted.Scalar: [form(V, 0.5)],
    aten.bucketize.Tensor: [form(X, V, out_int32=True)],
    aten.bucketize.Scalar: [form(0.3, V)],
    aten._unique2.default: [form(I), form(II, True, True, True)],
    aten.unique_dim.default: [form(II, 0, True, True, True)],
    aten.arange.default: [form(5, **STORED), form(5.0)],
    aten.arange.start: [form(1, 5, **STORED)],
    aten.arange.start_step: [form(1, 9, 3), form(0, 1, 0.25)],
    aten.linspace.default: [form(0, 1, 5, **STORED)],
    aten.logspace.default: [form(0, 1, 5), form(0, 1, 5, 2.0)],
    aten.full.default: [form([2, 3], 7, **STORED), form([2], True), form([], 1.5), form([2], 1, **F64)],
    aten.zeros.default: [form([2, 3], **STORED)],
    aten.ones.default: [form([], **INT)],
    aten.empty.memory_format: [form([2, 2], memory_format=torch.contiguous_format)],
    aten.empty_strided.default: [form([2, 2], [2, 1])],
    aten.empty_permuted.default: [form([2, 2], [1, 0])],
    aten.empty_like.default: LIKE,
    aten.zeros_like.default: LIKE,
    aten.ones_like.default: LIKE,
    aten.full_like.default: [form(I, 3, **STORED), form(X, 2, **INT)],
    aten.new_zeros.default: [form(I, [2], **STORED)],
    aten.new_ones.default: [form(I, [2, 2], **F64)],
    aten.new_full.default: [form(X, [2], 3)],
    aten.new_empty.default: [form(X, [2])],
    aten.new_empty_strided.default: [form(X, [2, 2], [2, 1])],
    aten.scalar_tensor.default: [form(3), form(3, **INT)],
    aten.eye.default: [form(3, **STORED)],
    aten.eye.m: [form(3, 2, **INT)],
    aten.tril_indices.default: [form(3, 4)],
    aten.triu_indices.default: [form(3, 4, 1, dtype=torch.int32)],
    aten.fill.Scalar: [form(X, 2), form(I, 2.5)],
    aten.fill.Tensor: [form(X, I[1])],
    aten.zero.default: [form(X)],
    aten.tril.default: [form(X)],
    aten.triu.default: [form(X, 1)],
}


def test_forms_cover_each_claimed_overload():
    """Every claimed overload is tested."""
    assert FORMS.keys() == OPERATORS.keys()


@pytest.mark.parametrize(
    ("overload", "args", "kwargs"),
    [pytest.param(o, *f, id=f"{o}-{i}") for o, forms in FORMS.items() for i, f in enumerate(forms)],
)
def test_converted_selection_call_equals_aten(overload, args, kwargs):
    """A converted call does the same as ATen."""
    op, graph, tensors = OPERATORS[overload], Graph("call"), []

    def entered(item: Any) -> Any:
        if isinstance(item, torch.Tensor):
            tensors.append(item)
            return graph.add_input(TensorType(item.dtype, tuple(item.shape)), "x")
        return tuple(map(entered, item)) if isinstance(item, list) else item

    call = op.converters[overload](*map(entered, args), **{k: entered(v) for k, v in kwargs.items()})
    attrs = {k: None if isinstance(v, torch.device) else v for k, v in call.attrs.items()}
    values = dict(zip(graph.inputs, tensors, strict=True))
    case = Case(op, [values[o] if isinstance(o, Value) else o for o in call.operands], attrs)
    node = graph.insert(Node(op, call.operands, attrs), types_of(case, list(call.operands)))
    for value in node.outputs:
        graph.add_output(value)

    expected = overload(*args, **kwargs)
    expected = [expected] if isinstance(expected, torch.Tensor) else list(expected)[: len(node.outputs)]
    if "empty" in str(overload):  # whose elements are whatever the memory held
        expected = [torch.zeros_like(e) for e in expected]
    for e, mine, run in zip(expected, case.eager(), run_onnx(graph, tensors), strict=True):
        for actual in (mine, run):
            assert (actual.dtype, actual.shape) == (e.dtype, e.shape)
            # 1e-6: a few ulp of elements of order 1; rounding has its own tests.
            assert torch.allclose(actual.double(), e.double(), rtol=1e-6, atol=1e-6, equal_nan=True)


class Bags(torch.nn.Module):
    """A call whose ATen form has results that nothing reads."""

    def __init__(self) -> None:
        super().__init__()
        self.bags = torch.nn.EmbeddingBag(5, 3)

    def forward(self, x: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        return self.bags(x, offsets)


def test_capture_embedding_bag_drops_unread_outputs():
    """Outputs that nothing reads may be left out."""
    registry = build_registry([Plugin("aten", "clika-ref-aten", "0", tuple(set(OPERATORS.values())))])
    found = capture(make_callable(Bags()), [ModelCall((I, BAGS), {})], registry, dynamic=False)
    assert [node.op_type for node in found.graph.nodes] == ["embedding_bag"]
