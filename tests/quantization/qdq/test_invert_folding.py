"""Inversion of the changes that passes make to a parameter, and changes without an inverse."""

import pytest
import torch
from clika_ref_cleanup.addmm_to_linear import transpose_weight
from clika_ref_cleanup.push_transposes import reshape_and_permute
from small_schemes import OPERATORS

from clika_ref.core.deferred_constants import DeferredConstant, make_source_constant
from clika_ref.core.ir import Value
from clika_ref.core.types import TensorType
from clika_ref.quantization.qdq.channel_scales import scale_along_dim, scale_input_channels
from clika_ref.quantization.qdq.invert_folding import find_inverse_steps
from clika_ref.quantization.qdq.norm_folding import fold_weight


def make_constant(*sides, seed=0, low=0.5):
    data = torch.rand(*sides, generator=torch.Generator().manual_seed(seed)) + low
    return make_source_constant(data, f"constant_{seed}")


def make_deferred_value(function, *sources, **arguments):
    formula = DeferredConstant(function, sources, tuple(arguments.items()))
    data = formula()
    return Value(TensorType(data.dtype, tuple(data.shape)), "made", data=formula)


def make_norm(channels):
    return make_constant(channels, seed=1), make_constant(channels, seed=2)


WEIGHT, COLUMNS, GROUPED = make_constant(8, 4, 3, 3), make_constant(6, 4), make_constant(8, 2, 3, 3)
DEFERRED_CONSTANTS = {
    "nothing": WEIGHT,
    "a norm": make_deferred_value(fold_weight, WEIGHT, *make_norm(8), eps=1e-5, groups=None),
    "a norm without a weight": make_deferred_value(fold_weight, WEIGHT, None, make_norm(8)[1], eps=1e-5, groups=None),
    "a norm after a transposed convolution": make_deferred_value(
        fold_weight, WEIGHT, *make_norm(8), eps=1e-5, groups=2
    ),
    "factors of what is read": make_deferred_value(scale_input_channels, WEIGHT, make_constant(4, seed=3), groups=1),
    "factors of what is read in groups": make_deferred_value(
        scale_input_channels, GROUPED, make_constant(8, seed=3), groups=4
    ),
    "factors of a computed tensor": make_deferred_value(scale_along_dim, WEIGHT, make_constant(8, seed=3), axis=0),
    "factors along another axis": make_deferred_value(scale_along_dim, WEIGHT, make_constant(4, seed=3), axis=1),
    "columns": make_deferred_value(transpose_weight, COLUMNS),
    "another order": make_deferred_value(reshape_and_permute, WEIGHT, shape=(8, 4, 3, 3), dims=(2, 3, 1, 0)),
    "another shape": make_deferred_value(reshape_and_permute, COLUMNS, shape=(1, 6, 4), dims=(2, 0, 1)),
    "an operator that moves": make_deferred_value(OPERATORS["permute"], COLUMNS, dims=(1, 0)),
    "several": make_deferred_value(
        scale_input_channels,
        make_deferred_value(
            transpose_weight, make_deferred_value(scale_along_dim, COLUMNS, make_constant(4, seed=3), axis=1)
        ),
        make_constant(6, seed=4),
        groups=1,
    ),
}


@pytest.mark.parametrize("value", DEFERRED_CONSTANTS.values(), ids=DEFERRED_CONSTANTS)
def test_find_inverse_steps_restores_parameter(value):
    """The steps invert each deferred constant."""
    parameter, steps = find_inverse_steps(value)
    found = value.data.clone()
    for step in steps:
        found = step(found)
    assert parameter.name == "constant_0"
    torch.testing.assert_close(found, parameter.data, rtol=1e-6, atol=0)  # one rounding for each step


def set_zero(x):
    x.data[1] = 0
    return x


NO_WAY = {
    "a product of two parameters": make_deferred_value(OPERATORS["mul"], COLUMNS, make_constant(6, 1, seed=1)),
    "a function that nobody knows": make_deferred_value(torch.square, COLUMNS),
    "a part": make_deferred_value(OPERATORS["slice"], COLUMNS, dim=0, start=0, end=3, step=1),
    "the reverse": make_deferred_value(OPERATORS["flip"], COLUMNS, dims=(0,)),
    "a norm that multiplies by 0": make_deferred_value(
        fold_weight, WEIGHT, set_zero(make_norm(8)[0]), make_norm(8)[1], eps=1e-5, groups=None
    ),
    "a mask over numbers": make_deferred_value(
        OPERATORS["mul"], COLUMNS, make_source_constant(COLUMNS.data > 1, "mask")
    ),
    "a function without a formula": Value(COLUMNS.type, "opaque", data=lambda: COLUMNS.data * 2),
}


@pytest.mark.parametrize("value", NO_WAY.values(), ids=NO_WAY)
def test_find_inverse_steps_not_invertible_returns_none(value):
    """Deferred constants that cannot be inverted return None."""
    assert find_inverse_steps(value) is None


def test_find_inverse_steps_mask_over_zeros_needs_no_step():
    """A mask over zeros needs no step."""
    weight = make_source_constant(COLUMNS.data * (COLUMNS.data > 1), "masked")
    assert find_inverse_steps(
        make_deferred_value(OPERATORS["mul"], weight, make_source_constant(COLUMNS.data > 1, "mask"))
    ) == (
        weight,
        [],
    )
