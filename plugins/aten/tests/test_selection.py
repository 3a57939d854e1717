"""Calls with ordered operands that samples cannot draw, such as searches and bags; and indices at the limits."""

from __future__ import annotations

import math

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
)
from one_operator import Case, build_case_graph, find_mismatch, run_onnx

from clika_ref.core.operators import Operator

NAN, INF = math.nan, math.inf


def check(op: Operator, *operands: object, **attrs: object) -> None:
    """Compare one call in eager PyTorch and in ONNX Runtime."""
    full = op.call(*operands, **attrs)
    case = Case(op, list(full.operands), full.attrs)
    assert find_mismatch(case, case.eager(), run_onnx(build_case_graph(case), case.tensors)) is None, str(case)


@pytest.mark.parametrize("right", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.uint8])
def test_searchsorted_finds_index_in_sorted_sequence(right, dtype):
    """searchsorted finds the index in a sorted sequence."""
    boundaries = torch.tensor([1, 2, 2, 4, 7], dtype=dtype)
    check(searching.searchsorted, boundaries, torch.arange(9, dtype=dtype).reshape(3, 3), None, right=right)


@pytest.mark.parametrize("right", [False, True])
def test_searchsorted_nan_at_end_and_infinities(right):
    """searchsorted puts NaN at the end and handles infinities."""
    x = torch.tensor([NAN, INF, -INF, 2.0])
    check(searching.searchsorted, torch.tensor([-INF, 1.0, 2.0, INF]), x, None, right=right)


@pytest.mark.parametrize("x", [2, 1.5, torch.tensor(2.0)])
def test_searchsorted_accepts_numbers(x):
    """searchsorted accepts numbers."""
    check(searching.searchsorted, torch.tensor([1.0, 2.0, 4.0]), x, None, out_int32=True)


def test_searchsorted_rows_with_sorter():
    """searchsorted works per row and with a sorter."""
    rows = torch.tensor([[5.0, 1.0, 3.0], [2.0, 9.0, 4.0]])
    check(searching.searchsorted, rows, torch.tensor([[0.0, 3.0], [3.0, 10.0]]), rows.argsort(-1))


@pytest.mark.parametrize("mode", [embedding.BAG_SUM, embedding.BAG_MEAN, embedding.BAG_MAX])
@pytest.mark.parametrize("padding_idx", [None, 2, -1])
@pytest.mark.parametrize("last", [False, True])
def test_embedding_bag_of_several_sizes_equals_eager(mode, padding_idx, last):
    """Bags of several sizes become rows."""
    weight = torch.randn(5, 3, generator=torch.Generator().manual_seed(0))
    indices = torch.tensor([0, 2, 4, 2, 4, 1, 1])
    offsets = torch.tensor([0, 3, 3, 5, 7])
    options = {"mode": mode, "padding_idx": padding_idx, "include_last_offset": last}
    check(embedding.embedding_bag, weight, indices, offsets, None, **options)
    if mode == embedding.BAG_SUM:
        check(embedding.embedding_bag, weight, indices, offsets, torch.arange(7.0), **options)


@pytest.mark.parametrize("op", [cumulative.cummax, cumulative.cummin])
def test_cummax_cummin_keep_nan_and_infinities(op):
    """Cumulative maxima and minima keep NaN and infinities."""
    check(op, torch.tensor([[-INF, 1.0, NAN, 2.0, NAN], [INF, INF, -INF, 3.0, 3.0]]), dim=1)


def test_logcumsumexp_keeps_infinities():
    """logcumsumexp handles infinities."""
    check(cumulative.logcumsumexp, torch.tensor([[-INF, -INF, 1.0], [2.0, INF, INF], [0.0, -INF, NAN]]), dim=1)


def test_logsumexp_does_not_overflow():
    """logsumexp does not overflow."""
    rows = [[1000.0, 1000.0], [-INF, -INF], [INF, 0.0], [NAN, 0.0], [-INF, -120.0], [-120.0, -INF], [-INF, INF]]
    check(reduction.logsumexp, torch.tensor(rows), dim=(1,))


@pytest.mark.parametrize("op", [reduction.sum_, reduction.prod, cumulative.cumsum, cumulative.cumprod])
def test_sum_and_prod_of_small_integers_use_int64(op):
    """Small integers are added and multiplied as int64."""
    check(op, torch.tensor([200, 100, 3], dtype=torch.uint8), dim=(0,) if op is reduction.sum_ else 0)
    check(op, torch.tensor([2**40, 3]), dim=(0,) if op is reduction.sum_ else 0)


@pytest.mark.parametrize("op", [reduction.nansum, reduction.nanmean])
def test_nansum_and_nanmean_leave_out_nan(op):
    """NaN is left out."""
    check(op, torch.tensor([[1.0, NAN, 3.0], [NAN, 2.0, INF]]), dim=(1,))


@pytest.mark.parametrize("op", [reduction.all_, reduction.any_])
def test_all_and_any_of_empty_and_nan_equal_eager(op):
    """all and any of empty tensors and of NaN equal eager's."""
    check(op, torch.zeros(2, 0), dim=(1,))
    check(op, torch.tensor([[NAN, 0.0], [0.0, 0.0], [NAN, 1.0]]), dim=(1,))


def test_sort_stable_keeps_order_in_both_directions():
    """Equal elements keep their order in both directions."""
    x = torch.tensor([[2.0, 1.0, 2.0, 1.0, 2.0], [0.0, 0.0, -1.0, -1.0, 3.0]])
    for descending in (False, True):
        check(sorting.sort, x, dim=1, descending=descending, stable=True)


def test_argmax_and_max_return_first_of_equals():
    """The index of the first of equal elements is returned."""
    for dtype in (torch.float32, torch.int64, torch.uint8):
        x = torch.tensor([[3, 7, 7, 3], [1, 1, 1, 1]], dtype=dtype)
        for op in (sorting.argmax, sorting.argmin, sorting.max_, sorting.min_):
            check(op, x, dim=1)


def test_index_put_and_index_add_repeated_indices_add_up():
    """Repeated indices add up."""
    x, index = torch.zeros(3, 2), torch.tensor([0, 0, -1, 0])
    check(scattering.index_put, x, torch.ones(4, 2), index, accumulate=True)
    check(scattering.index_put, x, torch.ones(3, 4), None, torch.tensor([1, -1, 1, 1]), accumulate=True)
    check(scattering.index_add, x, torch.tensor([2, 2, 0]), torch.ones(3, 2), dim=0, alpha=0.5)


def test_index_put_mask_takes_elements_in_order():
    """A masked write takes elements in order."""
    x = torch.arange(12.0).reshape(3, 4)
    mask = x % 3 == 0
    check(scattering.index_put, x, torch.tensor([9.0, 8.0, 7.0, 6.0]), mask)
    check(scattering.index_put, x, torch.tensor([9.0, 8.0, 7.0, 6.0]), mask, accumulate=True)
    check(scattering.index_put, x, torch.randn(2, 4), torch.tensor([True, False, True]))
    check(scattering.masked_scatter, x, torch.zeros(4, dtype=torch.bool), torch.zeros(0))


def test_index_mixes_masks_and_indices():
    """Masks and indices may be mixed."""
    x = torch.arange(60.0).reshape(3, 4, 5)
    rows = torch.tensor([True, False, True])
    check(indexing.index, x, rows, None, torch.tensor([4, -5]))
    check(indexing.index, x, None, torch.tensor([1, 1]), torch.tensor([[0], [-1]]))
    check(indexing.index, x, torch.zeros(3, 4, dtype=torch.bool))


def test_histc_ignores_elements_out_of_bounds():
    """Elements outside of a histogram are not counted."""
    x = torch.tensor([0.0, 0.1, 1.0, 2.0, 2.0001, -0.0001, NAN, INF])
    check(counting.histc, x, bins=3, min=0, max=2)
    check(counting.histc, torch.full((4,), 2.5), bins=4, min=0, max=0)


def test_full_of_special_numbers_equals_eager():
    """Special numbers fill tensors."""
    for value in (NAN, INF, -INF, 2**40):
        check(creation.full, size=(2, 3), fill_value=value)


def test_index_put_mask_of_several_dims_broadcasts():
    """A mask over several dims broadcasts the source."""
    x = torch.zeros(2, 3, 4, 2)
    mask = torch.arange(12).reshape(3, 4) % 2 == 0
    for shape in [(2, 1, 2), (2, 1, 1), (1, 2), (2,), ()]:
        for accumulate in (False, True):
            check(scattering.index_put, x, torch.randn(shape), None, mask, accumulate=accumulate)


@pytest.mark.parametrize("include_self", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.int64])
def test_scatter_reduce_mean_counts_and_rounds_down(include_self, dtype):
    """A scattered mean divides by its count and rounds integers down."""
    x, index = torch.tensor([5, -6, 7], dtype=dtype), torch.tensor([0, 0, 1, 1, 1])
    src = torch.tensor([-4, -3, 1, -8, 1], dtype=dtype)
    check(scattering.scatter_reduce, x, index, src, dim=0, reduce="mean", include_self=include_self)


@pytest.mark.parametrize("op", [reduction.all_, reduction.any_])
def test_all_and_any_over_no_dims_do_not_reduce(op):
    """With no dims, all and any reduce nothing."""
    check(op, torch.tensor([[0.0, 2.0], [NAN, 0.0]]), dim=())
