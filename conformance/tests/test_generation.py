"""Hypothesis as a generator: the same values for a seed, and small ones after a failure."""

import pytest
import torch
from clika_ref_conformance.drawing.calls.hypothesis_driver import call_strategy
from clika_ref_conformance.drawing.generation import collect, collect_without_mutations, shrink
from hypothesis import strategies as st
from sampled_operators import shift

from clika_ref.core.operators import operator


def test_a_seed_decides_what_is_collected():
    one, again, other = (collect(st.integers(), 20, seed) for seed in (3, 3, 4))
    assert one == again
    assert one != other
    assert len(one) == 20
    assert collect(st.integers(), 0, 3) == []


def test_a_strategy_with_few_values_gives_those():
    assert sorted(collect(st.booleans(), 30, 0)) == [False, True]


def test_values_apart_are_none_of_them_another_one_with_few_changes():
    strategy = st.lists(st.integers(0, 10**9), min_size=9, max_size=9)
    found = collect_without_mutations(strategy, 60, 0)
    assert found == collect_without_mutations(strategy, 60, 0)
    assert len(found) == 60
    assert sum(not any(one) for one in found) == 1
    pairs = [(a, b) for i, a in enumerate(found) for b in found[:i] if any(a) and any(b)]
    assert not [pair for pair in pairs if sum(a == b != 0 for a, b in zip(*pair, strict=True)) > 2]
    assert collect_without_mutations(strategy, 0, 0) == []
    assert (
        collect_without_mutations(st.booleans(), 3, 0)
        == collect(st.booleans(), 3, 0) + collect(st.booleans(), 3, 1)[1:]
    )


def test_a_failure_shrinks_to_the_smallest_value_that_fails():
    assert shrink(st.integers(0, 10**6), 50, 0, lambda n: n >= 1234, 20) == 1234
    assert shrink(st.integers(0, 9), 50, 0, lambda n: n > 9, 20) is None


def test_nothing_is_tried_when_time_is_up():
    tried = []
    assert shrink(st.integers(), 50, 0, lambda n: tried.append(n) or True, 0) is None
    assert tried == []


def test_calls_are_drawn_in_the_dtype_and_shrink_to_the_plainest():
    found = collect(call_strategy(shift, torch.float64), 30, 0)
    assert {d.call.operands[0].dtype for d in found} == {torch.float64}
    assert {d.call.attrs["twice"] for d in found} == {False, True}
    smallest = shrink(call_strategy(shift, torch.float64), 30, 0, lambda d: d.call.attrs["twice"], 20)
    assert smallest.call.attrs == {"by": 0.0, "dim": 0, "twice": True}
    assert smallest.call.operands[0].shape == (1,)
    assert (smallest.seed, smallest.vector) == (0, 0)


@operator()
def broken(x: torch.Tensor) -> torch.Tensor:
    """``x``."""
    return x


def test_a_sampler_that_fails_gives_its_error_in_place_of_a_call():
    broken.samples(lambda draw, s: s.call(draw(s.tensor()), draw(s.integers(0, 1)) // 0))
    (first, *_) = collect(call_strategy(broken, torch.float32), 5, 0)
    assert first.error.startswith("the samples of broken raise ZeroDivisionError: ")


def test_a_sampler_that_passes_a_value_to_draw_is_told():
    broken.samples(lambda draw, s: s.call(draw(3)))
    (first, *_) = collect(call_strategy(broken, torch.float32), 5, 0)
    assert "draw() takes a description made by `s`, not 3" in first.error


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64])
def test_integers_floats_and_choices_stay_in_their_ranges(dtype):
    for drawn in collect(call_strategy(shift, dtype), 40, 1):
        (x,) = drawn.call.operands
        assert 1 <= x.rank <= 3
        assert -x.rank <= drawn.call.attrs["dim"] < x.rank
