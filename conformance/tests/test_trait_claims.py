"""Claims of quantization traits are compared with eager: wrong ones are reported, and the bundled ones hold."""

import pytest
import torch
import torch.nn.functional as F
from clika_ref_conformance.judging.trait_claims import claim_of, find_broken_claim
from torch import Tensor

from clika_ref.core.operators import operator
from clika_ref.core.registry import load_registry
from clika_ref.core.traits import (
    HOMOGENEOUS_OWN_QPARAMS,
    KEEP_FLOAT,
    OWN_QPARAMS,
    SHARED_QPARAMS,
    UNIFIED_QPARAMS,
    compute_trait,
    own_qparams_scaled_by,
)

OPERATORS = load_registry().operators


def declare_operator(reference, trait):
    return operator(quant=trait)(reference)


def halve(x: Tensor) -> Tensor:
    """``x / 2``."""
    return x / 2


def pad(x: Tensor) -> Tensor:
    """``x`` between zeros."""
    return F.pad(x, (1, 1))


def rectify(x: Tensor) -> Tensor:
    """``max(x, 0)``."""
    return F.relu(x)


def sum_elements(x: Tensor) -> Tensor:
    """The sum of all elements."""
    return x.sum()


def clip(x: Tensor) -> Tensor:
    """``x`` up to 1."""
    return x.clamp(max=1.0)


def normalize(x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
    """``x`` by its largest element, scaled and shifted."""
    x = x / x.abs().amax()
    x = x if weight is None else x * weight
    return x if bias is None else x + bias


def concatenate(x: Tensor, y: Tensor) -> Tensor:
    """``x`` and ``y``, concatenated."""
    return torch.cat([x, y])


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """The linear layer of PyTorch."""
    return F.linear(x, weight, bias)


def linear_with_doubled_bias(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """A linear layer with twice the bias."""
    return F.linear(x, weight, None if bias is None else 2 * bias)


X, Y, WEIGHT, BIAS = torch.tensor([[1.0, -3.0]]), torch.tensor([[7.0, 8.0]]), torch.ones(3, 2), torch.arange(3.0) + 1


@pytest.mark.parametrize(
    ("reference", "trait", "operands", "broken"),
    [
        (halve, SHARED_QPARAMS, [X], "it returns 0.5, which is not an element of its first operand"),
        (halve, OWN_QPARAMS, [X], None),
        (halve, KEEP_FLOAT, [X], None),
        (pad, SHARED_QPARAMS, [X], None),
        (rectify, HOMOGENEOUS_OWN_QPARAMS, [X], None),
        (
            clip,
            HOMOGENEOUS_OWN_QPARAMS,
            [X],
            "doubling the first elements of the last dim does not double those of the result",
        ),
        (normalize, own_qparams_scaled_by(1, 2), [X, Y[0], Y[0]], None),
        (normalize, own_qparams_scaled_by(1, 2), [X, None, Y[0]], None),
        (
            normalize,
            own_qparams_scaled_by(1),
            [X, Y[0], Y[0]],
            "doubling the first elements of the last dim does not double",
        ),
        (normalize, own_qparams_scaled_by(1), [X.half() / 3, torch.full((2,), 5e-7).half()], None),
        (rectify, own_qparams_scaled_by(5), [X], "it has no operand 5: it has 1, counted from 0"),
        (
            sum_elements,
            HOMOGENEOUS_OWN_QPARAMS,
            [X],
            "the last dim of the first operand, [1, 2], is not that of its result, []",
        ),
        (linear, compute_trait(weight=1, bias=7), [X, WEIGHT, BIAS], "it has no operand 7: it has 3"),
        (concatenate, SHARED_QPARAMS, [X, Y], "it returns 7, which is not an element of its first operand"),
        (concatenate, UNIFIED_QPARAMS, [X, Y], None),
        (concatenate, UNIFIED_QPARAMS, [X, Y.int()], None),
        (linear, compute_trait(weight=1, axis=0, bias=2), [X, WEIGHT, BIAS], None),
        (linear, compute_trait(weight=1, axis=0, bias=2), [X, WEIGHT, None], None),
        (linear, compute_trait(weight=1, axis=0, bias=2), [X, WEIGHT[0], None], None),
        (
            linear,
            compute_trait(weight=1, axis=1, bias=2),
            [X, WEIGHT, BIAS],
            "axis 1 of its weight is not that of output",
        ),
        (linear, compute_trait(bias=2), [X[0], WEIGHT, BIAS], None),
        (
            linear,
            compute_trait(bias=2, channel=0),
            [torch.ones(2, 2), WEIGHT, BIAS],
            "dim 0 of its result is not that of",
        ),
        (
            linear_with_doubled_bias,
            compute_trait(weight=1, axis=0, bias=2),
            [X, WEIGHT, BIAS],
            "not an element of the bias, although",
        ),
    ],
)
def test_find_broken_claim_compares_with_eager(reference, trait, operands, broken):
    """The claim of a trait is compared with eager."""
    found = find_broken_claim(declare_operator(reference, trait), operands, {})
    assert (found is None) if broken is None else broken in found


@pytest.mark.parametrize("trait", [HOMOGENEOUS_OWN_QPARAMS, own_qparams_scaled_by(1, 2), SHARED_QPARAMS])
def test_claim_of_names_declared_trait(trait):
    """A claim is named as it is declared."""
    assert claim_of(trait) in {"HOMOGENEOUS", "scaled_by(1, 2)", "shared-qparams"}
    assert (claim_of(trait) == trait.kind) == (trait is SHARED_QPARAMS)


def test_traits_of_joined_tensors_use_unified_qparams():
    """Operators that broadcast or join several tensors have unified qparams."""
    for name in ("broadcast_tensors", "meshgrid", "masked_scatter"):
        assert OPERATORS[name].trait is UNIFIED_QPARAMS
