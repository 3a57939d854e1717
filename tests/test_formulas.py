"""Constants that say how they follow from others."""

import torch

from clika_ref.core.ir import Value
from clika_ref.core.types import TensorType
from clika_ref.formulas import Formula, given, is_deferred


def halves(x, *, dim):
    return x.chunk(2, dim)


def test_a_constant_follows_from_its_sources_as_they_are_when_it_is_read_without_gradients():
    source = given(torch.nn.Parameter(torch.arange(4.0).reshape(2, 2)), "weight")
    constant = Value(TensorType(torch.float32, (1, 2)), "half", data=Formula(halves, (source,), (("dim", 0),), 1))
    assert constant.data.tolist() == [[2, 3]]
    assert not constant.data.requires_grad
    source.data = source.data.detach() * 2
    assert constant.data.tolist() == [[4, 6]]
    assert is_deferred(constant)


def test_what_is_known_is_not_computed_and_counts_as_there():
    constant = Value(TensorType(torch.float32, ()), "known", data=Formula(halves, (None,), known=torch.tensor(3.0)))
    assert float(constant.data) == 3
    assert not is_deferred(constant)
    assert not is_deferred(given(torch.zeros(2), "there"))


def test_formulas_of_the_same_sources_are_equal_whether_known_or_not():
    source, other = given(torch.zeros(2), "a"), given(torch.zeros(2), "a")
    known = Formula(halves, (source,), (("dim", 0),), known=torch.zeros(1))
    assert known == Formula(halves, (source,), (("dim", 0),))
    assert hash(known) == hash(Formula(halves, (source,), (("dim", 0),)))
    assert known != Formula(halves, (other,), (("dim", 0),))
    assert known != Formula(halves, (source,), (("dim", 1),))
