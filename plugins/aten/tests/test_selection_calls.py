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
from one_operator import Case, infer_case_types, run_onnx

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
SCALAR = X[1, 1]
BAGS = torch.tensor([0, 2])
STORED = {"device": torch.device("cpu"), "pin_memory": False, "layout": torch.strided}
F64, INT = {"dtype": torch.float64}, {"dtype": torch.int64}

Form = tuple[tuple[Any, ...], dict[str, Any]]


def bind_arguments(*args: Any, **kwargs: Any) -> Form:
    return args, kwargs


OVER_DIMS = [
    bind_arguments(X, [1], True),
    bind_arguments(X, [], **F64),
    bind_arguments(X, None),
    bind_arguments(X, [0, -1]),
]
TRUTH = [bind_arguments(POSITIVE, [0, 1]), bind_arguments(POSITIVE, []), bind_arguments(POSITIVE)]
UNBIASED = [bind_arguments(X), bind_arguments(X, False)]
UNBIASED_DIMS = [bind_arguments(X, [0]), bind_arguments(X, [1], False, True)]
CORRECTED = [bind_arguments(X, [0]), bind_arguments(X), bind_arguments(X, [0], correction=0, keepdim=True)]
LIKE = [bind_arguments(I, **STORED), bind_arguments(X, dtype=torch.bool, memory_format=torch.preserve_format)]

FORMS: dict[Any, list[Form]] = {
    aten.index.Tensor: [bind_arguments(X, [None, I]), bind_arguments(X, [I, None]), bind_arguments(X, [POSITIVE])],
    aten.index_select.default: [bind_arguments(X, -1, I)],
    aten.gather.default: [bind_arguments(X, 1, II)],
    aten.take.default: [bind_arguments(X, II)],
    aten.take_along_dim.default: [bind_arguments(X, II), bind_arguments(X, II[:1, :1], 1)],
    aten.masked_select.default: [bind_arguments(X, POSITIVE)],
    aten.masked_scatter.default: [bind_arguments(X, POSITIVE, torch.arange(12.0))],
    aten.nonzero.default: [bind_arguments(POSITIVE)],
    aten.nonzero_numpy.default: [bind_arguments(POSITIVE)],
    aten.where.default: [bind_arguments(POSITIVE)],
    aten.argwhere.default: [bind_arguments(POSITIVE)],
    aten.one_hot.default: [bind_arguments(I, 3), bind_arguments(I)],
    aten.unique_consecutive.default: [bind_arguments(I), bind_arguments(II, True, True, 0)],
    aten.index_put.default: [bind_arguments(X, [I], X + 1, True), bind_arguments(X, [None, I], X[0, 0])],
    aten._index_put_impl.default: [bind_arguments(X, [I], X[1], False, False)],
    aten.scatter.src: [bind_arguments(X, 1, II, PAIR)],
    aten.scatter.value: [bind_arguments(X, 0, II, 2)],
    aten.scatter.reduce: [bind_arguments(X, 1, II, PAIR, reduce="add")],
    aten.scatter.value_reduce: [bind_arguments(X, 1, II, 2.0, reduce="multiply")],
    aten.scatter_add.default: [bind_arguments(X, 1, II, PAIR)],
    aten.scatter_reduce.two: [bind_arguments(X, 1, II, PAIR, "amax", include_self=False)],
    aten.index_add.default: [bind_arguments(X, 1, I, X[:, 1:], alpha=2), bind_arguments(SCALAR, 0, I[:1], SCALAR)],
    aten.index_copy.default: [bind_arguments(X, 1, I, X[:, 1:]), bind_arguments(SCALAR, 0, I[:1], SCALAR + 1)],
    aten.index_fill.int_Scalar: [bind_arguments(X, -1, I, 7), bind_arguments(SCALAR, 0, I[:1], 7)],
    aten.index_fill.int_Tensor: [bind_arguments(X, 0, I[:2], X[0, 0])],
    aten.embedding.default: [bind_arguments(X, II), bind_arguments(X, II, 0, False, True)],
    aten.embedding_bag.default: [bind_arguments(X, I, BAGS)],
    aten.embedding_bag.padding_idx: [bind_arguments(X, I, BAGS, False, 1, False, None, False, 1)],
    aten.sum.default: [bind_arguments(X), bind_arguments(X, **F64), bind_arguments(POSITIVE)],
    aten.sum.dim_IntList: OVER_DIMS,
    aten.mean.default: [bind_arguments(X), bind_arguments(X, **F64)],
    aten.mean.dim: OVER_DIMS,
    aten.nansum.default: [bind_arguments(X), *OVER_DIMS],
    aten.nanmean.default: [bind_arguments(X), *OVER_DIMS],
    aten.prod.default: [bind_arguments(X)],
    aten.prod.dim_int: [bind_arguments(X, 0, True)],
    aten.amax.default: [bind_arguments(X), bind_arguments(X, [1])],
    aten.amin.default: [bind_arguments(X, [0], True)],
    aten.max.default: [bind_arguments(X)],
    aten.min.default: [bind_arguments(X)],
    aten.max.dim: [bind_arguments(X, 0)],
    aten.min.dim: [bind_arguments(X, -1, True)],
    aten.aminmax.default: [bind_arguments(X), bind_arguments(X, dim=0)],
    aten.all.default: [bind_arguments(POSITIVE)],
    aten._is_all_true.default: [bind_arguments(POSITIVE), bind_arguments(X > -9)],
    aten._is_any_true.default: [bind_arguments(POSITIVE), bind_arguments(X > 9)],
    aten.all.dim: [bind_arguments(POSITIVE, 0), bind_arguments(POSITIVE, 1, True)],
    aten.all.dims: TRUTH,
    aten.any.default: [bind_arguments(POSITIVE)],
    aten.any.dim: [bind_arguments(POSITIVE, 0), bind_arguments(POSITIVE, 1, True)],
    aten.any.dims: TRUTH,
    aten.argmax.default: [bind_arguments(X)],
    aten.argmin.default: [bind_arguments(X, 1, True)],
    aten.logsumexp.default: [bind_arguments(X, [0])],
    aten.count_nonzero.default: [bind_arguments(X), bind_arguments(X, 1)],
    aten.count_nonzero.dim_IntList: [bind_arguments(X, [0]), bind_arguments(X, [])],
    aten.var.default: UNBIASED,
    aten.var.dim: UNBIASED_DIMS,
    aten.var.correction: CORRECTED,
    aten.std.default: UNBIASED,
    aten.std.dim: UNBIASED_DIMS,
    aten.std.correction: CORRECTED,
    aten.var_mean.default: UNBIASED,
    aten.var_mean.dim: UNBIASED_DIMS,
    aten.var_mean.correction: CORRECTED,
    aten.std_mean.default: UNBIASED,
    aten.std_mean.dim: UNBIASED_DIMS,
    aten.std_mean.correction: CORRECTED,
    aten.median.default: [bind_arguments(X)],
    aten.median.dim: [bind_arguments(X, 1)],
    aten.kthvalue.default: [bind_arguments(X, 2)],
    aten.histc.default: [bind_arguments(X, 4), bind_arguments(X, 3, -1, 2)],
    aten.bincount.default: [bind_arguments(I), bind_arguments(I, X[0, :3], 5)],
    aten.cumsum.default: [bind_arguments(X, 0), bind_arguments(I, 0, **F64)],
    aten.cumprod.default: [bind_arguments(X, 1)],
    aten.cummax.default: [bind_arguments(X, 1)],
    aten.cummin.default: [bind_arguments(X, 0)],
    aten.logcumsumexp.default: [bind_arguments(X, 1)],
    aten.diff.default: [bind_arguments(X), bind_arguments(X, 1, 0, X, None)],
    aten.topk.default: [bind_arguments(X, 2), bind_arguments(X, 1, 0, False, True)],
    aten.sort.default: [bind_arguments(X), bind_arguments(X, 0, True)],
    aten.sort.stable: [bind_arguments(X, stable=None), bind_arguments(X, stable=True, dim=0)],
    aten.argsort.default: [bind_arguments(X), bind_arguments(X, 0, True)],
    aten.argsort.stable: [bind_arguments(X, stable=True, dim=0, descending=True)],
    aten.msort.default: [bind_arguments(X)],
    aten.searchsorted.Tensor: [
        bind_arguments(V, X, right=True),
        bind_arguments(V, X, side="right"),
        bind_arguments(V, X, side="left", sorter=None),
    ],
    aten.searchsorted.Scalar: [bind_arguments(V, 0.5)],
    aten.bucketize.Tensor: [bind_arguments(X, V, out_int32=True)],
    aten.bucketize.Scalar: [bind_arguments(0.3, V)],
    aten._unique2.default: [bind_arguments(I), bind_arguments(II, True, True, True)],
    aten.unique_dim.default: [bind_arguments(II, 0, True, True, True)],
    aten.arange.default: [bind_arguments(5, **STORED), bind_arguments(5.0)],
    aten.arange.start: [bind_arguments(1, 5, **STORED)],
    aten.arange.start_step: [bind_arguments(1, 9, 3), bind_arguments(0, 1, 0.25)],
    aten.linspace.default: [bind_arguments(0, 1, 5, **STORED)],
    aten.logspace.default: [bind_arguments(0, 1, 5), bind_arguments(0, 1, 5, 2.0)],
    aten.full.default: [
        bind_arguments([2, 3], 7, **STORED),
        bind_arguments([2], True),
        bind_arguments([], 1.5),
        bind_arguments([2], 1, **F64),
    ],
    aten.zeros.default: [bind_arguments([2, 3], **STORED)],
    aten.ones.default: [bind_arguments([], **INT)],
    aten.empty.memory_format: [bind_arguments([2, 2], memory_format=torch.contiguous_format)],
    aten.empty_strided.default: [bind_arguments([2, 2], [2, 1])],
    aten.empty_permuted.default: [bind_arguments([2, 2], [1, 0])],
    aten.empty_like.default: LIKE,
    aten.zeros_like.default: LIKE,
    aten.ones_like.default: LIKE,
    aten.full_like.default: [bind_arguments(I, 3, **STORED), bind_arguments(X, 2, **INT)],
    aten.new_zeros.default: [bind_arguments(I, [2], **STORED)],
    aten.new_ones.default: [bind_arguments(I, [2, 2], **F64)],
    aten.new_full.default: [bind_arguments(X, [2], 3)],
    aten.new_empty.default: [bind_arguments(X, [2])],
    aten.new_empty_strided.default: [bind_arguments(X, [2, 2], [2, 1])],
    aten.scalar_tensor.default: [bind_arguments(3), bind_arguments(3, **INT)],
    aten.eye.default: [bind_arguments(3, **STORED)],
    aten.eye.m: [bind_arguments(3, 2, **INT)],
    aten.tril_indices.default: [bind_arguments(3, 4)],
    aten.triu_indices.default: [bind_arguments(3, 4, 1, dtype=torch.int32)],
    aten.fill.Scalar: [bind_arguments(X, 2), bind_arguments(I, 2.5)],
    aten.fill.Tensor: [bind_arguments(X, I[1])],
    aten.zero.default: [bind_arguments(X)],
    aten.tril.default: [bind_arguments(X)],
    aten.triu.default: [bind_arguments(X, 1)],
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

    def add_as_input(item: Any) -> Any:
        if isinstance(item, torch.Tensor):
            tensors.append(item)
            return graph.add_input(TensorType(item.dtype, tuple(item.shape)), "x")
        return tuple(map(add_as_input, item)) if isinstance(item, list) else item

    call = op.converters[overload](*map(add_as_input, args), **{k: add_as_input(v) for k, v in kwargs.items()})
    attrs = {k: None if isinstance(v, torch.device) else v for k, v in call.attrs.items()}
    values = dict(zip(graph.inputs, tensors, strict=True))
    case = Case(op, [values[o] if isinstance(o, Value) else o for o in call.operands], attrs)
    node = graph.insert(Node(op, call.operands, attrs), infer_case_types(case, list(call.operands)))
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
    """A call whose ATen form has unused results."""

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
