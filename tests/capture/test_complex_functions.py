"""Elementwise functions of pairs agree with those of complex tensors, also for very large and small parts."""

import math

import pytest
import torch

from clika_ref.capture import complex_functions as functions
from clika_ref.capture.complex_functions import Complex

UNARY = {
    "absolute": (functions.absolute, torch.abs),
    "cos": (functions.of_rotated(functions.cosh, rotates_back=False), torch.cos),
    "cosh": (functions.cosh, torch.cosh),
    "exp": (functions.exp, torch.exp),
    "expm1": (functions.expm1, torch.expm1),
    "log": (functions.log, torch.log),
    "log1p": (functions.log1p, torch.log1p),
    "power of a real number": (lambda z: functions.power(z, -1.5), lambda z: z**-1.5),
    "power of a complex number": (lambda z: functions.power(z, 1 + 2j), lambda z: z ** (1 + 2j)),
    "power of a whole number": (lambda z: functions.power(z, 3), lambda z: z**3),
    "power of a tensor": (lambda z: functions.power(z, z), lambda z: z**z),
    "base of a real number": (lambda z: functions.power(2, z), lambda z: 2**z),
    "sigmoid": (functions.sigmoid, torch.sigmoid),
    "sign": (functions.sign, torch.sgn),
    "sin": (functions.of_rotated(functions.sinh, rotates_back=True), torch.sin),
    "sinh": (functions.sinh, torch.sinh),
    "sqrt": (functions.sqrt, torch.sqrt),
    "tan": (functions.of_rotated(functions.tanh, rotates_back=True), torch.tan),
    "tanh": (functions.tanh, torch.tanh),
}

PARTS = (-7.3, -1.0, -1e-5, 0.0, 1e-4, 0.4, 1.0, 5.5)


def split(z):
    """Return a complex tensor as a pair."""
    return Complex(z.real, z.imag)


def join(result):
    """Return a pair as a complex tensor."""
    return torch.complex(result.real, result.imag) if isinstance(result, Complex) else result


@pytest.mark.parametrize("name", UNARY)
def test_complex_function_agrees_with_eager(name):
    """A function agrees with eager in all quadrants, on the axes and at 0, to 64 roundings of the larger part."""
    own, eager = UNARY[name]
    z = torch.tensor([complex(x, y) for x in PARTS for y in PARTS])
    actual, expected = join(own(split(z))), eager(z)
    is_finite = expected.isfinite() if "power" in name else torch.ones_like(expected, dtype=torch.bool)
    torch.testing.assert_close(actual[is_finite], expected[is_finite], rtol=64 * 2**-23, atol=1e-6, equal_nan=True)


SCALES = (1e-30, 1e-24, 1.0, 1e22, 1e30)


@pytest.mark.parametrize("scale", SCALES)
def test_absolute_neither_overflows_nor_underflows(scale):
    """The magnitude of very large and small numbers agrees with eager to 4 roundings."""
    torch.manual_seed(0)
    z = torch.randn(100, dtype=torch.complex64) * scale
    torch.testing.assert_close(functions.absolute(split(z)), z.abs(), rtol=4 * 2**-23, atol=0)


def test_absolute_of_infinite_part_is_infinite():
    """The magnitude is infinite if a part is, even if the other one is NaN."""
    z = torch.tensor([complex(-math.inf, math.nan), complex(1, math.inf), complex(math.nan, 1)])
    torch.testing.assert_close(functions.absolute(split(z)), z.abs(), equal_nan=True)


@pytest.mark.parametrize("scale", SCALES)
def test_divide_neither_overflows_nor_underflows(scale):
    """The quotient of very large and small numbers agrees with eager to 8 roundings."""
    torch.manual_seed(0)
    a, b = torch.randn(2, 100, dtype=torch.complex64) * scale
    torch.testing.assert_close(join(functions.divide(split(a), split(b))), a / b, rtol=8 * 2**-23, atol=1e-6)
    torch.testing.assert_close(join(functions.divide(a.real, split(b))), a.real / b, rtol=8 * 2**-23, atol=1e-6)


def test_absolute_gradient_agrees_with_eager():
    """The scale of the larger part does not change the gradient, also where both parts are equal."""
    z = torch.tensor([3 + 4j, 1e-24 - 1e-24j, -2 + 2j, 0j, 1e22 + 1j], requires_grad=True)
    expected = torch.autograd.grad(z.abs().sum(), z)[0]
    actual = torch.autograd.grad(functions.absolute(split(z)).sum(), z)[0]
    torch.testing.assert_close(actual, expected)


def test_comparisons_read_both_parts():
    """Numbers are equal if both parts are; a test of NaN holds if it holds of either part."""
    z = torch.tensor([1 + 2j, 1 + 3j, complex(math.nan, 0)])
    assert functions.is_equal(split(z), 1 + 2j).tolist() == [True, False, False]
    assert functions.is_different(split(z), split(z)).tolist() == [False, False, True]
    assert functions.is_any(torch.isnan)(split(z)).tolist() == [False, False, True]
    assert functions.is_each(torch.isfinite)(split(z)).tolist() == [True, True, False]
