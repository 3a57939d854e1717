"""The cover: any two options of two decisions meet, in the dtype that is asked for."""

import itertools
import random

import pytest
import torch
from clika_ref_conformance.drawing.calls.covering import (
    CoveringDraw,
    PairCoverage,
    draw_covering_calls,
    draw_empty_calls,
)
from clika_ref_conformance.drawing.calls.dtypes import DtypeSelector, has_dtype_choices, select_dtypes
from sampled_operators import shift
from torch import Tensor

from clika_ref.core.operators import operator
from clika_ref.core.registry import load_registry
from clika_ref.core.samples import Descriptions, TensorSample


@operator()
def four(x: Tensor, *, a: int, b: int, c: int, d: str) -> Tensor:
    """``x``, whatever the attributes are."""
    return x


@four.samples
def _(draw, s):
    x = draw(s.tensor(shape=(2,)))
    values = {"a": draw(s.choice(0, 1, 2)), "b": draw(s.integers(0, 5)), "c": draw(s.choice(0, 1, 2))}
    return s.call(x, **values, d=draw(s.choice("p", "q")))


def test_any_two_options_of_two_decisions_meet():
    calls = [row.call.attrs for row in draw_covering_calls(four, torch.float32, 0, limit=40)]
    classes = [{**c, "b": "low" if c["b"] == 0 else "high" if c["b"] == 5 else "middle"} for c in calls]
    sizes = {"a": 3, "b": 3, "c": 3, "d": 2}
    for (one, few), (other, many) in itertools.combinations(sizes.items(), 2):
        assert len({(c[one], c[other]) for c in classes}) == few * many, (one, other)
    assert len(calls) < 27  # all combinations are 54, and pairs of 3 options need 9


def test_the_first_row_is_the_plainest():
    (first, *_) = draw_covering_calls(four, torch.float32, 0)
    assert (first.call.attrs["a"], first.call.attrs["d"]) == (0, "p")


def test_what_is_listed_twice_and_tensors_that_show_more_are_drawn_more_often():
    cover, s = PairCoverage(random.Random(0)), Descriptions()
    listed, ranks = [], []
    for _ in range(30):
        draw = CoveringDraw(cover, DtypeSelector(torch.float32, choices=False))
        ranks.append(draw(s.tensor()).rank)
        listed.append(draw(s.choice(0, 0, 1)))
        cover.add(draw.row)
    assert listed.count(0) == 20
    assert ranks.count(0) == 6


def test_of_options_whose_pairs_have_all_met_the_one_comes_that_makes_a_new_triple():
    cover = PairCoverage(random.Random(0))
    for a, b, c in ((0, 0, 0), (0, 1, 1), (1, 0, 1), (1, 1, 0)):
        cover.add([("a", a), ("b", b), ("c", c)])
    assert cover.best([("a", 0), ("b", 0)], "c", (1, 1)) == 1
    assert cover.best([("a", 0), ("b", 1)], "c", (1, 1)) == 0


def test_a_cover_is_the_same_for_the_same_seed_and_another_for_another():
    one, again, other = (draw_covering_calls(shift, torch.float32, seed) for seed in (1, 1, 2))
    assert one == again
    assert one != other


def test_a_cover_has_ranks_and_sides_of_both_ends():
    shapes = [row.call.operands[0].shape for row in draw_covering_calls(shift, torch.float32, 0, limit=40)]
    assert {1, 3} <= {len(shape) for shape in shapes}
    assert any(1 in shape for shape in shapes)


def test_empty_sides_are_tried_and_refusals_left_out():
    found = draw_empty_calls(shift, torch.float32, 0, lambda call: [torch.zeros(call.operands[0].shape)])
    assert found
    assert all(0 in row.call.operands[0].shape for row in found)
    assert draw_empty_calls(shift, torch.float32, 0, lambda call: None) == []


def test_there_is_an_empty_call_for_each_thing_that_becomes_of_the_side():
    shapes = itertools.cycle([(2, 0), (0, 2), (2,)])
    found = draw_empty_calls(pair, torch.float32, 0, lambda call: [torch.zeros(next(shapes))])
    assert len(found) > 3
    same = draw_empty_calls(pair, torch.float32, 0, lambda call: [torch.zeros(call.operands[0].shape)])
    assert {row.call.operands[0].shape.index(0) for row in same} == {0, 1}, "first, one before the last, and last"


def test_there_is_an_empty_call_with_and_without_each_tensor_that_may_be_left_out():
    found = draw_empty_calls(weighted, torch.float32, 0, lambda call: [torch.zeros(call.operands[0].shape)])
    assert {row.call.operands[1] is None for row in found} == {True, False}


def test_each_number_that_given_sides_are_made_of_becomes_0():
    found = draw_empty_calls(counted, torch.float32, 0, lambda call: [torch.zeros(call.operands[0].shape)])
    places = {tuple(tuple(i for i, n in enumerate(o.shape) if n == 0) for o in row.call.operands) for row in found}
    assert places == {((0,), (0,)), ((1,), ()), ((), (1,))}, "what is no side makes nothing empty"
    assert draw_empty_calls(counted, torch.float32, 0, lambda call: None) == []


@operator()
def counted(x: Tensor, weight: Tensor, *, padding: int) -> Tensor:
    """``x``, whatever the weight and the padding are."""
    return x


@counted.samples
def _(draw, s):
    rows, columns, others = draw(s.integers(1, 4)), draw(s.choice(2, 3)), draw(s.integers(2, 5))
    x, weight = draw(s.tensor(shape=(rows, columns))), draw(s.tensor(shape=(rows, others)))
    return s.call(x, weight, padding=draw(s.integers(1, 2)))


@operator()
def weighted(x: Tensor, weight: Tensor | None = None) -> Tensor:
    """``x``, weighted."""
    return x


@weighted.samples
def _(draw, s):
    x = draw(s.tensor(rank=2))
    return s.call(x, draw(s.tensor(shape=x.shape)) if draw(s.booleans()) else None)


@operator()
def pair(x: Tensor, *, a: int) -> Tensor:
    """``x``, whatever ``a`` is."""
    return x


@pair.samples
def _(draw, s):
    return s.call(draw(s.tensor(rank=2)), a=draw(s.integers(0, 50)))


def test_a_covering_draw_refuses_what_is_no_description():
    draw = CoveringDraw(PairCoverage(random.Random(0)), DtypeSelector(torch.float32, choices=False))
    with pytest.raises(TypeError, match=r"draw\(\) takes a description made by `s`, not 3"):
        draw(3)


def test_the_dtype_axis_holds_the_first_list_and_any_float():
    for dtype in (torch.float32, torch.float64, torch.int64):
        rows = draw_covering_calls(shift, dtype, 0)
        assert {row.call.operands[0].dtype for row in rows} == {dtype}
        assert not any(row.has_unlisted_dtype for row in rows)
    halves = draw_covering_calls(four, torch.float16, 0)
    assert {row.call.operands[0].dtype for row in halves} == {torch.float16}
    assert all(row.has_unlisted_dtype for row in halves)


@operator()
def alike(x: Tensor, y: Tensor, *, dtype: torch.dtype) -> Tensor:
    """``x + y`` in another dtype."""
    return (x + y).to(dtype)


@alike.samples
def _(draw, s):
    chosen = draw(s.choice(torch.float32, torch.int32, torch.int64))
    x = draw(s.tensor(rank=1, dtype=chosen))
    y = draw(s.tensor(shape=x.shape, dtype=x.dtype))
    return s.call(x, y, dtype=draw(s.choice(torch.float64, torch.int64)))


def test_a_dtype_that_is_chosen_before_the_tensors_is_held_and_one_of_the_result_is_free():
    assert has_dtype_choices(alike, torch.int64)
    assert has_dtype_choices(shift, torch.int64) is False
    rows = draw_covering_calls(alike, torch.int64, 0)
    assert {o.dtype for row in rows for o in row.call.operands} == {torch.int64}
    assert {row.call.attrs["dtype"] for row in rows} == {torch.float64, torch.int64}


def test_an_operator_has_the_columns_that_it_takes_or_its_own():
    wanted = (torch.float16, torch.int64)
    assert select_dtypes(shift, wanted) == [torch.float16, torch.int64]
    assert select_dtypes(shift, (torch.uint8,)) == [torch.float32]
    assert select_dtypes(four, wanted) == [torch.float16]
    assert select_dtypes(alike, (torch.uint8,)) != []
    assert all(isinstance(o, TensorSample) for o in draw_covering_calls(shift, torch.float32, 0)[0].call.operands)


def test_a_float_that_samples_do_not_list_stands_for_those_that_they_do_in_all_operands():
    """What is drawn like the first operand was another float: a product of two dtypes, which eager refuses."""
    (row, *_) = draw_covering_calls(load_registry().operators["matmul"], torch.bfloat16, 0)
    assert [o.dtype for o in row.call.operands] == [torch.bfloat16, torch.bfloat16]
    assert row.has_unlisted_dtype
