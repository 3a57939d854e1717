"""Calls whose operands obey an order, which no description can draw: searches, bags; and elements at the edges."""

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
from one_operator import Case, graph_of, mismatch, run_onnx

from clika_ref.core.operators import Operator

NAN, INF = math.nan, math.inf


def check(op: Operator, *operands: object, **attrs: object) -> None:
    """Compare one call in eager PyTorch and in ONNX Runtime."""
    full = op.call(*operands, **attrs)
    case = Case(op, list(full.operands), full.attrs)
    assert mismatch(case, case.eager(), run_onnx(graph_of(case), case.tensors)) is None, str(case)


@pytest.mark.parametrize("right", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.uint8])
def test_a_search_finds_the_place_in_a_sorted_sequence(right, dtype):
    boundaries = torch.tensor([1, 2, 2, 4, 7], dtype=dtype)
    check(searching.searchsorted, boundaries, torch.arange(9, dtype=dtype).reshape(3, 3), None, right=right)


@pytest.mark.parametrize("right", [False, True])
def test_a_search_puts_nan_at_the_end_and_knows_infinities(right):
    x = torch.tensor([NAN, INF, -INF, 2.0])
    check(searching.searchsorted, torch.tensor([-INF, 1.0, 2.0, INF]), x, None, right=right)


@pytest.mark.parametrize("x", [2, 1.5, torch.tensor(2.0)])
def test_a_search_takes_numbers(x):
    check(searching.searchsorted, torch.tensor([1.0, 2.0, 4.0]), x, None, out_int32=True)


def test_a_search_goes_through_rows_and_through_a_sorter():
    rows = torch.tensor([[5.0, 1.0, 3.0], [2.0, 9.0, 4.0]])
    check(searching.searchsorted, rows, torch.tensor([[0.0, 3.0], [3.0, 10.0]]), rows.argsort(-1))


@pytest.mark.parametrize("mode", [embedding.BAG_SUM, embedding.BAG_MEAN, embedding.BAG_MAX])
@pytest.mark.parametrize("padding_idx", [None, 2, -1])
@pytest.mark.parametrize("last", [False, True])
def test_bags_of_several_sizes_become_rows(mode, padding_idx, last):
    weight = torch.randn(5, 3, generator=torch.Generator().manual_seed(0))
    indices = torch.tensor([0, 2, 4, 2, 4, 1, 1])
    offsets = torch.tensor([0, 3, 3, 5, 7])
    options = {"mode": mode, "padding_idx": padding_idx, "include_last_offset": last}
    check(embedding.embedding_bag, weight, indices, offsets, None, **options)
    if mode == embedding.BAG_SUM:
        check(embedding.embedding_bag, weight, indices, offsets, torch.arange(7.0), **options)


@pytest.mark.parametrize("op", [cumulative.cummax, cumulative.cummin])
def test_running_extremes_keep_nan_and_infinities(op):
    check(op, torch.tensor([[-INF, 1.0, NAN, 2.0, NAN], [INF, INF, -INF, 3.0, 3.0]]), dim=1)


def test_running_sums_of_exponentials_know_infinities():
    check(cumulative.logcumsumexp, torch.tensor([[-INF, -INF, 1.0], [2.0, INF, INF], [0.0, -INF, NAN]]), dim=1)


def test_the_sum_of_exponentials_does_not_overflow():
    check(reduction.logsumexp, torch.tensor([[1000.0, 1000.0], [-INF, -INF], [INF, 0.0], [NAN, 0.0]]), dim=(1,))


@pytest.mark.parametrize("op", [reduction.sum_, reduction.prod, cumulative.cumsum, cumulative.cumprod])
def test_small_integers_are_added_and_multiplied_as_int64(op):
    check(op, torch.tensor([200, 100, 3], dtype=torch.uint8), dim=(0,) if op is reduction.sum_ else 0)
    check(op, torch.tensor([2**40, 3]), dim=(0,) if op is reduction.sum_ else 0)


@pytest.mark.parametrize("op", [reduction.nansum, reduction.nanmean])
def test_what_is_not_a_number_is_left_out(op):
    check(op, torch.tensor([[1.0, NAN, 3.0], [NAN, 2.0, INF]]), dim=(1,))


@pytest.mark.parametrize("op", [reduction.all_, reduction.any_])
def test_the_truth_of_nothing_and_of_nan(op):
    check(op, torch.zeros(2, 0), dim=(1,))
    check(op, torch.tensor([[NAN, 0.0], [0.0, 0.0], [NAN, 1.0]]), dim=(1,))


def test_equal_elements_keep_their_order_both_ways():
    x = torch.tensor([[2.0, 1.0, 2.0, 1.0, 2.0], [0.0, 0.0, -1.0, -1.0, 3.0]])
    for descending in (False, True):
        check(sorting.sort, x, dim=1, descending=descending, stable=True)


def test_the_first_of_equal_elements_is_reported():
    for dtype in (torch.float32, torch.int64, torch.uint8):
        x = torch.tensor([[3, 7, 7, 3], [1, 1, 1, 1]], dtype=dtype)
        for op in (sorting.argmax, sorting.argmin, sorting.max_, sorting.min_):
            check(op, x, dim=1)


def test_repeated_positions_are_added_up():
    x, index = torch.zeros(3, 2), torch.tensor([0, 0, -1, 0])
    check(scattering.index_put, x, torch.ones(4, 2), index, accumulate=True)
    check(scattering.index_put, x, torch.ones(3, 4), None, torch.tensor([1, -1, 1, 1]), accumulate=True)
    check(scattering.index_add, x, torch.tensor([2, 2, 0]), torch.ones(3, 2), dim=0, alpha=0.5)


def test_a_masked_write_takes_values_in_order():
    x = torch.arange(12.0).reshape(3, 4)
    mask = x % 3 == 0
    check(scattering.index_put, x, torch.tensor([9.0, 8.0, 7.0, 6.0]), mask)
    check(scattering.index_put, x, torch.tensor([9.0, 8.0, 7.0, 6.0]), mask, accumulate=True)
    check(scattering.index_put, x, torch.randn(2, 4), torch.tensor([True, False, True]))
    check(scattering.masked_scatter, x, torch.zeros(4, dtype=torch.bool), torch.zeros(0))


def test_masks_and_positions_stand_side_by_side():
    x = torch.arange(60.0).reshape(3, 4, 5)
    rows = torch.tensor([True, False, True])
    check(indexing.index, x, rows, None, torch.tensor([4, -5]))
    check(indexing.index, x, None, torch.tensor([1, 1]), torch.tensor([[0], [-1]]))
    check(indexing.index, x, torch.zeros(3, 4, dtype=torch.bool))


def test_what_lies_outside_a_histogram_is_not_counted():
    x = torch.tensor([0.0, 0.1, 1.0, 2.0, 2.0001, -0.0001, NAN, INF])
    check(counting.histc, x, bins=3, min=0, max=2)
    check(counting.histc, torch.full((4,), 2.5), bins=4, min=0, max=0)


def test_special_numbers_fill_tensors():
    for value in (NAN, INF, -INF, 2**40):
        check(creation.full, size=(2, 3), fill_value=value)


def test_a_mask_over_several_sides_meets_values_that_broadcast():
    x = torch.zeros(2, 3, 4, 2)
    mask = torch.arange(12).reshape(3, 4) % 2 == 0
    for shape in [(2, 1, 2), (2, 1, 1), (1, 2), (2,), ()]:
        for accumulate in (False, True):
            check(scattering.index_put, x, torch.randn(shape), None, mask, accumulate=accumulate)


@pytest.mark.parametrize("include_self", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.int64])
def test_a_scattered_mean_divides_by_what_went_in_and_rounds_integers_down(include_self, dtype):
    x, index = torch.tensor([5, -6, 7], dtype=dtype), torch.tensor([0, 0, 1, 1, 1])
    src = torch.tensor([-4, -3, 1, -8, 1], dtype=dtype)
    check(scattering.scatter_reduce, x, index, src, dim=0, reduce="mean", include_self=include_self)


@pytest.mark.parametrize("op", [reduction.all_, reduction.any_])
def test_no_sides_at_all_leave_truth_unreduced(op):
    check(op, torch.tensor([[0.0, 2.0], [NAN, 0.0]]), dim=())
