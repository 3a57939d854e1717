"""Hypothesis as a generator: equal values for equal seeds, and small values after a failure."""

import pytest
import torch
from clika_ref_conformance.drawing.calls.hypothesis_driver import make_call_strategy
from clika_ref_conformance.drawing.generation import collect, collect_without_mutations, shrink
from hypothesis import strategies as st
from sampled_operators import shift

from clika_ref.core.operators import operator


def test_collect_same_seed_repeats():
    """The seed decides the collected examples."""
    one, again, other = (collect(st.integers(), 20, seed) for seed in (3, 3, 4))
    assert one == again
    assert one != other
    assert len(one) == 20
    assert collect(st.integers(), 0, 3) == []


def test_collect_small_strategy_returns_all_examples():
    """A strategy with few examples gives only those."""
    assert sorted(collect(st.booleans(), 30, 0)) == [False, True]


def test_collect_without_mutations_returns_distinct_examples():
    """No example is another one with few changes."""
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


def test_shrink_failure_returns_smallest_example():
    """A failure shrinks to the smallest example that fails."""
    assert shrink(st.integers(0, 10**6), 50, 0, lambda n: n >= 1234, 20) == 1234
    assert shrink(st.integers(0, 9), 50, 0, lambda n: n > 9, 20) is None


def test_shrink_no_time_tries_nothing():
    """Nothing is tried when no time is left."""
    tried = []
    assert shrink(st.integers(), 50, 0, lambda n: tried.append(n) or True, 0) is None
    assert tried == []


def test_call_strategy_draws_dtype_and_shrinks():
    """Calls have the requested dtype and shrink to the plainest."""
    found = collect(make_call_strategy(shift, torch.float64), 30, 0)
    assert {d.call.operands[0].dtype for d in found} == {torch.float64}
    assert {d.call.attrs["twice"] for d in found} == {False, True}
    smallest = shrink(make_call_strategy(shift, torch.float64), 30, 0, lambda d: d.call.attrs["twice"], 20)
    assert smallest.call.attrs == {"by": 0.0, "dim": 0, "twice": True}
    assert smallest.call.operands[0].shape == (1,)
    assert (smallest.seed, smallest.vector) == (0, 0)


@operator()
def identity_op(x: torch.Tensor) -> torch.Tensor:
    """``x``."""
    return x


def test_call_strategy_sampler_error_returned():
    """A sampler that fails gives its error in place of a call."""
    identity_op.samples(lambda draw, s: s.call(draw(s.tensor()), draw(s.integers(0, 1)) // 0))
    (first, *_) = collect(make_call_strategy(identity_op, torch.float32), 5, 0)
    assert first.error.startswith("the samples of identity_op raise ZeroDivisionError: ")


def test_call_strategy_draw_of_number_reported():
    """A sampler that passes a number to draw is reported."""
    identity_op.samples(lambda draw, s: s.call(draw(3)))
    (first, *_) = collect(make_call_strategy(identity_op, torch.float32), 5, 0)
    assert "cannot draw 3: it is not a description made with `s`" in first.error


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64])
def test_call_strategy_numbers_stay_in_bounds(dtype):
    """Ranks and attributes stay in their declared bounds."""
    for drawn in collect(make_call_strategy(shift, dtype), 40, 1):
        (x,) = drawn.call.operands
        assert 1 <= x.rank <= 3
        assert -x.rank <= drawn.call.attrs["dim"] < x.rank
