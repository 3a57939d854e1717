"""The cover: each pair of options of two decisions occurs, in the requested dtype."""

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


def test_draw_covering_calls_covers_each_pair():
    """Any two options of two decisions occur together."""
    calls = [row.call.attrs for row in draw_covering_calls(four, torch.float32, 0, limit=40)]
    classes = [{**c, "b": "low" if c["b"] == 0 else "high" if c["b"] == 5 else "middle"} for c in calls]
    sizes = {"a": 3, "b": 3, "c": 3, "d": 2}
    for (one, few), (other, many) in itertools.combinations(sizes.items(), 2):
        assert len({(c[one], c[other]) for c in classes}) == few * many, (one, other)
    assert len(calls) < 27  # all combinations are 54, and pairs of 3 options need 9


def test_draw_covering_calls_first_row_plainest():
    """The first row is the plainest call."""
    (first, *_) = draw_covering_calls(four, torch.float32, 0)
    assert (first.call.attrs["a"], first.call.attrs["d"]) == (0, "p")


def test_pair_coverage_repeated_options_drawn_more_often():
    """Options listed twice and tensors of more dims are drawn more often."""
    cover, s = PairCoverage(random.Random(0)), Descriptions()
    listed, ranks = [], []
    for _ in range(30):
        draw = CoveringDraw(cover, DtypeSelector(torch.float32, choices=False))
        ranks.append(draw(s.tensor()).rank)
        listed.append(draw(s.choice(0, 0, 1)))
        cover.add(draw.row)
    assert listed.count(0) == 20
    assert ranks.count(0) == 6


def test_pair_coverage_best_prefers_new_triple():
    """If all pairs are covered, the option that makes a new triple is chosen."""
    cover = PairCoverage(random.Random(0))
    for a, b, c in ((0, 0, 0), (0, 1, 1), (1, 0, 1), (1, 1, 0)):
        cover.add([("a", a), ("b", b), ("c", c)])
    assert cover.choose_option([("a", 0), ("b", 0)], "c", (1, 1)) == 1
    assert cover.choose_option([("a", 0), ("b", 1)], "c", (1, 1)) == 0


def test_draw_covering_calls_depends_on_seed():
    """The calls are equal for equal seeds and differ for other seeds."""
    one, again, other = (draw_covering_calls(shift, torch.float32, seed) for seed in (1, 1, 2))
    assert one == again
    assert one != other


def test_draw_covering_calls_has_lowest_and_highest_rank():
    """The calls have the lowest and the highest rank, and dims of size 1."""
    shapes = [row.call.operands[0].shape for row in draw_covering_calls(shift, torch.float32, 0, limit=40)]
    assert {1, 3} <= {len(shape) for shape in shapes}
    assert any(1 in shape for shape in shapes)


def test_draw_empty_calls_skips_rejected_calls():
    """Empty dims are drawn, and calls that eager rejects are left out."""
    found = draw_empty_calls(shift, torch.float32, 0, lambda call: [torch.zeros(call.operands[0].shape)])
    assert found
    assert all(0 in row.call.operands[0].shape for row in found)
    assert draw_empty_calls(shift, torch.float32, 0, lambda call: None) == []


def test_draw_empty_calls_covers_each_effect_of_empty_dim():
    """There is a call for each effect of the empty dim on the output."""
    shapes = itertools.cycle([(2, 0), (0, 2), (2,)])
    found = draw_empty_calls(pair, torch.float32, 0, lambda call: [torch.zeros(next(shapes))])
    assert len(found) > 3
    same = draw_empty_calls(pair, torch.float32, 0, lambda call: [torch.zeros(call.operands[0].shape)])
    assert {row.call.operands[0].shape.index(0) for row in same} == {0, 1}, "first, one before the last, and last"


def test_draw_empty_calls_covers_optional_tensors():
    """There is an empty call with and without each optional tensor."""
    found = draw_empty_calls(scale_by_weight, torch.float32, 0, lambda call: [torch.zeros(call.operands[0].shape)])
    assert {row.call.operands[1] is None for row in found} == {True, False}


def test_draw_empty_calls_sets_each_size_number_to_0():
    """Each number that determines a size becomes 0."""
    found = draw_empty_calls(pad_by_weight, torch.float32, 0, lambda call: [torch.zeros(call.operands[0].shape)])
    places = {tuple(tuple(i for i, n in enumerate(o.shape) if n == 0) for o in row.call.operands) for row in found}
    assert places == {((0,), (0,)), ((1,), ()), ((), (1,))}, "an attribute that is not a dim makes no tensor empty"
    assert draw_empty_calls(pad_by_weight, torch.float32, 0, lambda call: None) == []


@operator()
def pad_by_weight(x: Tensor, weight: Tensor, *, padding: int) -> Tensor:
    """``x``, whatever the weight and the padding are."""
    return x


@pad_by_weight.samples
def _(draw, s):
    rows, columns, others = draw(s.integers(1, 4)), draw(s.choice(2, 3)), draw(s.integers(2, 5))
    x, weight = draw(s.tensor(shape=(rows, columns))), draw(s.tensor(shape=(rows, others)))
    return s.call(x, weight, padding=draw(s.integers(1, 2)))


@operator()
def scale_by_weight(x: Tensor, weight: Tensor | None = None) -> Tensor:
    """``x``, weighted."""
    return x


@scale_by_weight.samples
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


def test_covering_draw_other_object_raises():
    """An object that is no description of `s` raises TypeError."""
    draw = CoveringDraw(PairCoverage(random.Random(0)), DtypeSelector(torch.float32, choices=False))
    with pytest.raises(TypeError, match=r"cannot draw 3: it is not a description made with `s`"):
        draw(3)


def test_draw_covering_calls_dtype_may_be_unlisted_float():
    """The dtype of the calls is the requested one, if listed or any float."""
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


def test_draw_covering_calls_operand_dtype_fixed_result_free():
    """A dtype drawn for operands is fixed; a dtype of the result is free."""
    assert has_dtype_choices(alike, torch.int64)
    assert has_dtype_choices(shift, torch.int64) is False
    rows = draw_covering_calls(alike, torch.int64, 0)
    assert {o.dtype for row in rows for o in row.call.operands} == {torch.int64}
    assert {row.call.attrs["dtype"] for row in rows} == {torch.float64, torch.int64}


def test_select_dtypes_falls_back_to_own_dtypes():
    """An operator gets the requested dtypes that it supports, or one of its own."""
    wanted = (torch.float16, torch.int64)
    assert select_dtypes(shift, wanted) == [torch.float16, torch.int64]
    assert select_dtypes(shift, (torch.uint8,)) == [torch.float32]
    assert select_dtypes(four, wanted) == [torch.float16]
    assert select_dtypes(alike, (torch.uint8,)) != []
    assert all(isinstance(o, TensorSample) for o in draw_covering_calls(shift, torch.float32, 0)[0].call.operands)


def test_draw_covering_calls_unlisted_float_shared_by_operands():
    """A float that samples do not list replaces the listed ones in all operands."""
    (row, *_) = draw_covering_calls(load_registry().operators["matmul"], torch.bfloat16, 0)
    assert [o.dtype for o in row.call.operands] == [torch.bfloat16, torch.bfloat16]
    assert row.has_unlisted_dtype
