"""Elementwise functions of complex numbers that are pairs of real tensors."""

from __future__ import annotations

import cmath
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Complex:
    """A complex tensor as its real and imaginary parts."""

    real: Tensor
    imag: Tensor

    def map(self, function: Callable[[Tensor], Tensor]) -> Complex:
        """Apply a linear function with real coefficients."""
        return Complex(function(self.real), function(self.imag))


def to_complex(value: Any) -> Complex:
    """Return a complex or real tensor, or a number, as a pair."""
    if isinstance(value, Complex):
        return value
    if isinstance(value, Tensor):
        return Complex(value, torch.zeros_like(value))
    return Complex(value.real, value.imag)


def real_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of the parts of a complex dtype, and real dtypes unchanged."""
    return dtype.to_real() if dtype.is_complex else dtype


MAX_MULTIPLIED_EXPONENT = 8
"""The largest exponent whose powers are products."""

# Arithmetic


def multiply_parts(target: Callable[..., Tensor], a: Any, b: Any, *rest: Any) -> Complex:
    """Apply a product, such as a matrix product, to all combinations of parts."""
    if not isinstance(a, Complex | complex):
        is_number = not isinstance(a, Tensor)
        return to_complex(b).map(lambda part: target(part, a, *rest) if is_number else target(a, part, *rest))
    if not isinstance(b, Complex | complex):
        return to_complex(a).map(lambda part: target(part, b, *rest))
    x, y = to_complex(a), to_complex(b)
    real = target(x.real, y.real, *rest) - target(x.imag, y.imag, *rest)
    return Complex(real, target(x.real, y.imag, *rest) + target(x.imag, y.real, *rest))


def multiply(a: Any, b: Any) -> Complex:
    """``a b``."""
    return multiply_parts(torch.mul, a, b)


def add(a: Any, b: Any, *, alpha: Any = 1) -> Complex:
    """``a + alpha b``."""
    scaled = b if alpha == 1 else multiply(b, alpha) if isinstance(b, Tensor | Complex) else b * alpha
    x, y = to_complex(a), to_complex(scaled)
    return Complex(x.real + y.real, x.imag + y.imag)


def subtract(a: Any, b: Any, *, alpha: Any = 1) -> Complex:
    """``a - alpha b``."""
    return add(a, b, alpha=-alpha)


def conjugate(x: Any) -> Complex:
    """``re - i im``."""
    z = to_complex(x)
    return Complex(z.real, -z.imag)


def _find_size(z: Complex) -> Tensor:
    """Return the larger magnitude of both parts, as a factor without a gradient.

    Squares of parts that are divided by it neither overflow nor underflow.
    """
    return torch.maximum(z.real.abs(), z.imag.abs()).detach()


def divide(a: Any, b: Any) -> Complex:
    """``a / b = (a / s) conj(b / s) / |b / s|^2`` with ``s`` the larger part of ``b``."""
    if not isinstance(b, Complex | complex):
        return to_complex(a).map(lambda part: part / b)
    if isinstance(b, complex):
        return multiply(a, 1 / b)
    size = _find_size(b)
    y = b.map(lambda part: part / size)
    scaled = a.map(lambda part: part / size) if isinstance(a, Complex) else _scale_real(a, size)
    square = y.real * y.real + y.imag * y.imag
    return multiply(scaled, conjugate(y)).map(lambda part: part / square)


def _scale_real(a: Any, size: Tensor) -> Any:
    return to_complex(a).map(lambda part: part / size) if isinstance(a, complex) else a / size


def absolute(z: Complex) -> Tensor:
    """``s sqrt((re / s)^2 + (im / s)^2)`` with ``s`` the larger part, and the gradient 0 at 0."""
    size, is_infinite = _find_size(z), z.real.isinf() | z.imag.isinf()
    size = size.masked_fill((size == 0) | is_infinite, 1)
    y = z.map(lambda part: part / size)
    square = y.real * y.real + y.imag * y.imag
    is_zero = square == 0
    found = size * square.masked_fill(is_zero, 1).sqrt().masked_fill(is_zero, 0)
    return found.masked_fill(is_infinite, math.inf)


def angle(z: Complex) -> Tensor:
    """Return the angle in radians, from -pi to pi."""
    return torch.atan2(z.imag, z.real)


def sign(z: Complex) -> Complex:
    """``z / |z|``, and 0 at 0."""
    size = absolute(z)
    return z.map(lambda part: part / size.masked_fill(size == 0, 1))


def power(base: Any, exponent: Any) -> Complex:
    """``base ** exponent``, each a number or a tensor; by products for small whole exponents."""
    if isinstance(exponent, int) and 0 <= exponent <= MAX_MULTIPLIED_EXPONENT:
        result: Any = to_complex(torch.ones_like(base.real))
        for _ in range(exponent):
            result = multiply(result, base)
        return result
    if isinstance(exponent, int | float):
        return sqrt(base) if exponent == 0.5 else polar(absolute(base) ** exponent, angle(base) * exponent)
    if not isinstance(base, Tensor | Complex):
        return exp(multiply(exponent, cmath.log(base)))
    z = to_complex(base)
    is_zero = is_equal(z, 0)
    found = exp(multiply(log(Complex(z.real.masked_fill(is_zero, 1), z.imag)), exponent))
    found = found.map(lambda part: part.masked_fill(is_zero, 0))
    if isinstance(exponent, complex):
        return found
    is_undefined = is_zero & is_equal(exponent, 0)
    return found.map(lambda part: part.masked_fill(is_undefined, math.nan))


def polar(size: Tensor, angle: Tensor) -> Complex:
    """``size exp(i angle)``."""
    return Complex(size * angle.cos(), size * angle.sin())


# Functions; those of real arguments call them with a pair


def exp(z: Complex) -> Complex:
    """``exp(re) (cos im + i sin im)``."""
    return polar(z.real.exp(), z.imag)


def expm1(z: Complex) -> Complex:
    """``exp(z) - 1``, with ``1 - cos im = 2 sin(im / 2)^2``."""
    half = (z.imag / 2).sin()
    return Complex(z.real.expm1() * z.imag.cos() - 2 * half * half, z.real.exp() * z.imag.sin())


def log(z: Complex, base: float | None = None) -> Complex:
    """``log |z| + i angle(z)``, of the base e if none is given."""
    found = Complex(absolute(z).log(), angle(z))
    return found if base is None else found.map(lambda part: part / math.log(base))


def log1p(z: Complex) -> Complex:
    """``log(1 + z)``, with ``|1 + z|^2 - 1 = re (2 + re) + im^2``."""
    excess = z.real * (2 + z.real) + z.imag * z.imag
    is_small = excess.abs() < 0.5  # elsewhere the logarithm of 1 + z is as precise
    large = absolute(Complex(1 + z.real, z.imag)).log()
    small = excess.masked_fill(~is_small, 0).log1p() / 2
    return Complex(torch.where(is_small, small, large), torch.atan2(z.imag, 1 + z.real))


def sqrt(z: Complex) -> Complex:
    """Return the root with a real part of 0 or more: its larger part is ``sqrt((|z| + |re|) / 2)``."""
    large = (absolute(z) / 2 + z.real.abs() / 2).sqrt()
    small = z.imag.abs() / (2 * large).masked_fill(large == 0, 1)
    is_right = z.real >= 0
    imag = torch.where(is_right, small, large)
    return Complex(torch.where(is_right, large, small), torch.copysign(imag, z.imag))


def sigmoid(z: Complex) -> Complex:
    """``1 / (1 + exp(-z))``."""
    return divide(1.0, add(exp(z.map(torch.neg)), 1))


def sinh(z: Complex) -> Complex:
    """``sinh re cos im + i cosh re sin im``."""
    return Complex(z.real.sinh() * z.imag.cos(), z.real.cosh() * z.imag.sin())


def cosh(z: Complex) -> Complex:
    """``cosh re cos im + i sinh re sin im``."""
    return Complex(z.real.cosh() * z.imag.cos(), z.real.sinh() * z.imag.sin())


def tanh(z: Complex) -> Complex:
    """``(tanh re + i sin im cos im / cosh(re)^2) / (cos(im)^2 + tanh(re)^2 sin(im)^2)``, which does not overflow."""
    slope, sine, cosine = z.real.tanh(), z.imag.sin(), z.imag.cos()
    inverse = z.real.cosh().reciprocal()
    norm = cosine * cosine + slope * slope * sine * sine
    return Complex(slope / norm, sine * cosine * inverse * inverse / norm)


def of_rotated(function: Callable[[Complex], Complex], *, rotates_back: bool) -> Callable[[Complex], Complex]:
    """Return ``f(i z)``, as ``cos z = cosh(i z)``; divided by i with ``rotates_back``, as ``sin z = sinh(i z) / i``."""

    def run(z: Complex) -> Complex:
        found = function(Complex(-z.imag, z.real))
        return Complex(found.imag, -found.real) if rotates_back else found

    return run


# Statistics and comparisons


def variance(z: Complex, *args: Any, **kwargs: Any) -> Tensor:
    """``E |z - E z|^2``, the sum of the variances of both parts."""
    return torch.ops.aten.var(z.real, *args, **kwargs) + torch.ops.aten.var(z.imag, *args, **kwargs)


def standard_deviation(z: Complex, *args: Any, **kwargs: Any) -> Tensor:
    """Return the root of the variance."""
    return variance(z, *args, **kwargs).sqrt()


def is_equal(a: Any, b: Any) -> Tensor:
    """Whether both parts are equal."""
    x, y = to_complex(a), to_complex(b)
    return (x.real == y.real) & (x.imag == y.imag)


def is_different(a: Any, b: Any) -> Tensor:
    """Whether a part differs."""
    return ~is_equal(a, b)


def is_any(test: Callable[[Tensor], Tensor]) -> Callable[[Complex], Tensor]:
    """Return whether a test holds of either part."""
    return lambda z: test(z.real) | test(z.imag)


def is_each(test: Callable[[Tensor], Tensor]) -> Callable[[Complex], Tensor]:
    """Return whether a test holds of both parts."""
    return lambda z: test(z.real) & test(z.imag)
