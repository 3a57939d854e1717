"""The way back from what passes make of a parameter: each formula undone, and those that nothing undoes."""

import pytest
import torch
from clika_ref_cleanup.addmm_to_linear import transposed
from clika_ref_cleanup.push_transposes import turned
from small_schemes import OPERATORS

from clika_ref.core.ir import Value
from clika_ref.core.types import TensorType
from clika_ref.formulas import Formula, given
from clika_ref.norm_folding import folded_weight
from clika_ref.quantization.factors import scaled_along, times
from clika_ref.quantization.unfolding import way_back


def constant(*sides, seed=0, low=0.5):
    data = torch.rand(*sides, generator=torch.Generator().manual_seed(seed)) + low
    return given(data, f"constant_{seed}")


def made(function, *sources, **arguments):
    formula = Formula(function, sources, tuple(arguments.items()))
    data = formula()
    return Value(TensorType(data.dtype, tuple(data.shape)), "made", data=formula)


def norm(channels):
    return constant(channels, seed=1), constant(channels, seed=2)


WEIGHT, COLUMNS, GROUPED = constant(8, 4, 3, 3), constant(6, 4), constant(8, 2, 3, 3)
FORMULAS = {
    "nothing": WEIGHT,
    "a norm": made(folded_weight, WEIGHT, *norm(8), eps=1e-5, groups=None),
    "a norm without a weight": made(folded_weight, WEIGHT, None, norm(8)[1], eps=1e-5, groups=None),
    "a norm behind a transposed convolution": made(folded_weight, WEIGHT, *norm(8), eps=1e-5, groups=2),
    "factors of what is read": made(times, WEIGHT, constant(4, seed=3), groups=1),
    "factors of what is read in groups": made(times, GROUPED, constant(8, seed=3), groups=4),
    "factors of what is made": made(scaled_along, WEIGHT, constant(8, seed=3), axis=0),
    "factors along another side": made(scaled_along, WEIGHT, constant(4, seed=3), axis=1),
    "columns": made(transposed, COLUMNS),
    "another order": made(turned, WEIGHT, shape=(8, 4, 3, 3), dims=(2, 3, 1, 0)),
    "another shape": made(turned, COLUMNS, shape=(1, 6, 4), dims=(2, 0, 1)),
    "an operator that moves": made(OPERATORS["permute"], COLUMNS, dims=(1, 0)),
    "several": made(
        times,
        made(transposed, made(scaled_along, COLUMNS, constant(4, seed=3), axis=1)),
        constant(6, seed=4),
        groups=1,
    ),
}


@pytest.mark.parametrize("value", FORMULAS.values(), ids=FORMULAS)
def test_each_formula_is_undone(value):
    parameter, steps = way_back(value)
    found = value.data.clone()
    for step in steps:
        found = step(found)
    assert parameter.name == "constant_0"
    torch.testing.assert_close(found, parameter.data, rtol=1e-6, atol=0)  # one rounding for each step


def with_zero(x):
    x.data[1] = 0
    return x


NO_WAY = {
    "a product of two parameters": made(OPERATORS["mul"], COLUMNS, constant(6, 1, seed=1)),
    "a function that nobody knows": made(torch.square, COLUMNS),
    "a part": made(OPERATORS["slice"], COLUMNS, dim=0, start=0, end=3, step=1),
    "the reverse": made(OPERATORS["flip"], COLUMNS, dims=(0,)),
    "a norm that multiplies by 0": made(
        folded_weight, WEIGHT, with_zero(norm(8)[0]), norm(8)[1], eps=1e-5, groups=None
    ),
    "a mask over numbers": made(OPERATORS["mul"], COLUMNS, given(COLUMNS.data > 1, "mask")),
    "a function without a formula": Value(COLUMNS.type, "opaque", data=lambda: COLUMNS.data * 2),
}


@pytest.mark.parametrize("value", NO_WAY.values(), ids=NO_WAY)
def test_there_is_no_way_back_from_others(value):
    assert way_back(value) is None


def test_a_mask_is_no_step_where_what_it_takes_out_is_0_already():
    weight = given(COLUMNS.data * (COLUMNS.data > 1), "masked")
    assert way_back(made(OPERATORS["mul"], weight, given(COLUMNS.data > 1, "mask"))) == (weight, [])
