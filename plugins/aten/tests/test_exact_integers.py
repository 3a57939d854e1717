"""Integers beyond 2 ** 53, which a runtime loses if it computes them in float64."""

from __future__ import annotations

import pytest
import torch
from clika_ref_aten import arithmetic, contraction, reduction
from one_operator import assert_runtime_equals_eager, draw_case

LEAST, GREATEST = torch.iinfo(torch.int64).min, torch.iinfo(torch.int64).max


@pytest.mark.parametrize("op", [reduction.sum_, reduction.nansum])
def test_sum_of_integers_exact_and_wraps(op):
    """Sums of integers are exact and wrap around."""
    x = torch.tensor([[LEAST, 3, GREATEST], [1, -2, 4], [2**40, -(2**62), 2**62 + 2**53 + 1], [LEAST, LEAST, -1]])
    assert_runtime_equals_eager(op, x, dim=(1,))
    assert_runtime_equals_eager(op, x, keepdim=True)
    assert_runtime_equals_eager(op, torch.tensor([2**30] * 3), dtype=torch.int32)
    assert_runtime_equals_eager(op, torch.tensor([2**31 - 1] * 5, dtype=torch.int32), dtype=torch.int32)
    assert_runtime_equals_eager(op, torch.tensor([200, 100], dtype=torch.uint8), dtype=torch.uint8)
    assert_runtime_equals_eager(op, torch.tensor([2.5, 1.5]), dtype=torch.int64)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int16, torch.int8])
def test_div_wrapped_divisor_equals_eager(dtype):
    """A divisor that wraps around gives eager's result; min / -1 would end the runtime's process."""
    limits = torch.iinfo(dtype)
    x = torch.tensor([limits.min, limits.max, -100, 5], dtype=dtype)
    assert_runtime_equals_eager(arithmetic.fmod, x, -(2**40) - 1)
    assert_runtime_equals_eager(arithmetic.remainder, x, -(2**40) - 1)
    for divisor in (2**limits.bits - 7, -(2**40) - 3):
        assert_runtime_equals_eager(arithmetic.div, x, divisor, rounding_mode="floor")


def test_div_underflowing_divisor_equals_zero():
    """A divisor that underflows in the dtype is zero."""
    assert_runtime_equals_eager(arithmetic.div, torch.tensor([3.0, -3.0]), 1e-50, rounding_mode="floor")


@pytest.mark.parametrize("equation", ["bcb->b", "bcb->", "bcb,a->a"])
def test_einsum_diagonal_with_empty_dim_runs(equation):
    """A diagonal around an empty dim does not end the process."""
    tensors = (torch.ones(3, 0, 3), torch.ones(2))[: 1 + equation.count(",")]
    assert_runtime_equals_eager(contraction.einsum, *tensors, equation=equation)


def test_einsum_int8_broadcast_sum_uses_int64():
    """One int8 operand summed over a broadcast dim is summed as int64."""
    x, y = torch.full((3, 4), 100, dtype=torch.int8), torch.ones(1, 4, dtype=torch.int8)
    assert_runtime_equals_eager(contraction.einsum, x, y, equation="i...,i...->...")


@pytest.mark.parametrize("divisor", [-7, -2, 2, 3])
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.int16, torch.int8])
def test_div_floor_of_integer_limits_exact(dtype, divisor):
    """Quotients that are rounded down do not overflow."""
    limits = torch.iinfo(dtype)
    x = torch.tensor([limits.min, limits.max, -5, 5, 0, 6, -6], dtype=dtype)
    assert_runtime_equals_eager(arithmetic.div, x, divisor, rounding_mode="floor")
    assert_runtime_equals_eager(arithmetic.div, x, torch.full((), divisor, dtype=dtype), rounding_mode="floor")


@pytest.mark.parametrize("divisor", [-7, -2, 2, 3])
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.int16, torch.int8])
def test_fmod_of_integer_limits_exact(dtype, divisor):
    """Remainders with the sign of the dividend are exact."""
    limits = torch.iinfo(dtype)
    x = torch.tensor([limits.min, limits.max, -5, 5, 0], dtype=dtype)
    assert_runtime_equals_eager(arithmetic.fmod, x, divisor)
    assert_runtime_equals_eager(arithmetic.fmod, x, torch.full((), divisor, dtype=dtype))


@pytest.mark.parametrize("equation", ["ii", "ij->", "ii->i", "ij->j", "ij,k->k"])
def test_einsum_single_operand_sum_exact(equation):
    """Sums of a single operand of einsum are exact."""
    x = torch.tensor([[LEAST, 3, 1], [5, 2, 7], [2, 1, GREATEST]])
    others = [torch.tensor([2, 3])] if "," in equation else []
    assert_runtime_equals_eager(contraction.einsum, x, *others, equation=equation)


@pytest.mark.parametrize("dtype", [torch.int32, torch.uint8])
@pytest.mark.parametrize(
    ("equation", "shapes"),
    [("ii", [(2, 2)]), ("ij->j", [(1, 3)]), ("ij,k->k", [(2, 3), (2,)]), ("ij,j->j", [(1, 3), (3,)]), ("i,i", [2, 2])],
)
def test_einsum_narrow_integers_equal_eager_dtype(dtype, equation, shapes):
    """Narrow integers become int64 where eager calls sum."""
    tensors = [torch.full(torch.Size([s] if isinstance(s, int) else s), 120, dtype=dtype) for s in shapes]
    assert_runtime_equals_eager(contraction.einsum, *tensors, equation=equation)


@pytest.mark.parametrize("shape", [(3, 3), (3, 4), (4, 2), (0, 3)])
def test_trace_of_integers_exact(shape):
    """Traces of integers are exact."""
    x = torch.arange(shape[0] * shape[1]).reshape(shape) + 2**60 + 1
    assert_runtime_equals_eager(contraction.trace, x)


@pytest.mark.parametrize("op", [arithmetic.div, arithmetic.fmod, arithmetic.remainder], ids=lambda op: op.name)
def test_samples_no_divisor_minus_1_drawn(op):
    """No sample has the integer divisor -1, as min / -1 ends the process."""
    for seed in range(300):
        divisor = torch.as_tensor(draw_case(op, seed).operands[1])
        assert divisor.is_floating_point() or not (divisor == -1).any(), seed
