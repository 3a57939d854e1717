"""Deferred constants: functions of other constants."""

import torch

from clika_ref.core.deferred_constants import DeferredConstant, is_deferred, make_source_constant
from clika_ref.core.ir import Value
from clika_ref.core.types import TensorType


def split_in_half(x, *, dim):
    return x.chunk(2, dim)


def test_deferred_constant_follows_changed_source():
    """A deferred constant is computed from its current sources, without gradients."""
    source = make_source_constant(torch.nn.Parameter(torch.arange(4.0).reshape(2, 2)), "weight")
    constant = Value(
        TensorType(torch.float32, (1, 2)), "half", data=DeferredConstant(split_in_half, (source,), (("dim", 0),), 1)
    )
    assert constant.data.tolist() == [[2, 3]]
    assert not constant.data.requires_grad
    source.data = source.data.detach() * 2
    assert constant.data.tolist() == [[4, 6]]
    assert is_deferred(constant)


def test_deferred_constant_known_value_not_computed():
    """A known value is returned without computation and counts as not deferred."""
    constant = Value(
        TensorType(torch.float32, ()), "known", data=DeferredConstant(split_in_half, (None,), known=torch.tensor(3.0))
    )
    assert float(constant.data) == 3
    assert not is_deferred(constant)
    assert not is_deferred(make_source_constant(torch.zeros(2), "there"))


def test_deferred_constant_same_sources_equal():
    """Deferred constants of equal function and sources are equal, known or not."""
    source, other = make_source_constant(torch.zeros(2), "a"), make_source_constant(torch.zeros(2), "a")
    known = DeferredConstant(split_in_half, (source,), (("dim", 0),), known=torch.zeros(1))
    assert known == DeferredConstant(split_in_half, (source,), (("dim", 0),))
    assert hash(known) == hash(DeferredConstant(split_in_half, (source,), (("dim", 0),)))
    assert known != DeferredConstant(split_in_half, (other,), (("dim", 0),))
    assert known != DeferredConstant(split_in_half, (source,), (("dim", 1),))
