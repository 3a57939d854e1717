"""The error function: ONNX's Erf, or polynomials in float64, where ONNX Runtime has no kernel."""

from __future__ import annotations

import math
from functools import reduce

import torch

ERF_DIRECT_LIMIT = 0.46875
"""Below this, erf is computed directly; above as ``1 - erfc``, since near 0 the difference loses all digits."""

ERFC_ZERO_LIMIT = 30.0
"""From here on erfc is 0 in float64, while the quotient of polynomials would overflow eventually."""

STEPS_PER_UNIT = 16.0
"""``|x|`` truncated to multiples of ``1 / STEPS_PER_UNIT`` has an exact square, and thus a precise exponential.

Source: as `ERF_COEFFICIENTS`.
"""

ERF_COEFFICIENTS = (
    (1.85777706184603153e-1, 3.16112374387056560, 1.13864154151050156e2, 3.77485237685302021e2, 3.20937758913846947e3),
    (1.0, 2.36012909523441209e1, 2.44024637934444173e2, 1.28261652607737228e3, 2.84423683343917062e3),
)
"""Numerator and denominator of ``erf(x) / x`` in powers of ``x ** 2``, the highest first.

Source: Cody, "Rational Chebyshev Approximations for the Error Function", as in his CALERF (netlib, specfun).
"""

ERFC_COEFFICIENTS = (
    (
        *(2.15311535474403846e-8, 5.64188496988670089e-1, 8.88314979438837594, 6.61191906371416295e1),
        *(2.98635138197400131e2, 8.81952221241769090e2, 1.71204761263407058e3, 2.05107837782607147e3),
        1.23033935479799725e3,
    ),
    (
        *(1.0, 1.57449261107098347e1, 1.17693950891312499e2, 5.37181101862009858e2, 1.62138957456669019e3),
        *(3.29079923573345963e3, 4.36261909014324716e3, 3.43936767414372164e3, 1.23033935480374942e3),
    ),
)
"""Numerator and denominator of ``erfc(x) * exp(x ** 2)`` in powers of ``x``. Source: as `ERF_COEFFICIENTS`."""

ERFC_COEFFICIENTS_LIMIT = 4.0
"""In float64, `ERFC_COEFFICIENTS` is precise below and `ERFC_TAIL_COEFFICIENTS` above; float32 uses only the first."""

ERFC_TAIL_COEFFICIENTS = (
    (
        *(1.63153871373020978e-2, 3.05326634961232344e-1, 3.60344899949804439e-1, 1.25781726111229246e-1),
        *(1.60837851487422766e-2, 6.58749161529837803e-4),
    ),
    (
        *(1.0, 2.56852019228982242, 1.87295284992346725, 5.27905102951428412e-1, 6.05183413124413191e-2),
        2.33520497626869185e-3,
    ),
)
"""Numerator and denominator of ``(1 / sqrt(pi) - erfc(x) * exp(x ** 2) * x) * x ** 2`` in powers of ``1 / x ** 2``.

Source: as `ERF_COEFFICIENTS`.
"""


def error_function(op, x):
    """Return ``erf(x)``: one Erf node, or two quotients of polynomials in float64."""
    if op.dtype(x) != torch.float64:
        return op.Erf(x)
    size = op.Abs(x)
    near = op.Mul(x, _polynomial_quotient(op, op.Mul(x, x), ERF_COEFFICIENTS))
    far = op.Sub(op.like(x, 1), _erfc_above_limit(op, size))
    return op.Where(op.Less(size, op.like(x, ERF_DIRECT_LIMIT)), near, op.Mul(op.Sign(x), far))


def complementary_error_function(op, x):
    """Return ``erfc(x)``, as ``1 - erf(x)`` only where that is precise; FP16 and BF16 are computed in float32."""
    dtype = op.dtype(x)
    x = op.cast(x, torch.float64 if dtype == torch.float64 else torch.float32)
    near, tail = op.Sub(op.like(x, 1), error_function(op, x)), _erfc_above_limit(op, op.Abs(x))
    far = op.Where(op.Less(x, op.like(x, 0)), op.Sub(op.like(x, 2), tail), tail)
    return op.cast(op.Where(op.Less(op.Abs(x), op.like(x, ERF_DIRECT_LIMIT)), near, far), dtype)


def _erfc_above_limit(op, size):
    """Return ``erfc(size)`` above `ERF_DIRECT_LIMIT`: an exponential in two factors times a quotient of polynomials."""
    size = op.Where(op.Greater(size, op.like(size, ERFC_ZERO_LIMIT)), op.like(size, ERFC_ZERO_LIMIT), size)
    whole = op.Div(op.Floor(op.Mul(size, op.like(size, STEPS_PER_UNIT))), op.like(size, STEPS_PER_UNIT))
    rest = op.Mul(op.Sub(size, whole), op.Add(size, whole))
    shrunk = op.Mul(op.Exp(op.Neg(op.Mul(whole, whole))), op.Exp(op.Neg(rest)))
    scaled = _polynomial_quotient(op, size, ERFC_COEFFICIENTS)
    if op.dtype(size) == torch.float64:
        beyond = op.Div(_scale_erfc_tail(op, op.Reciprocal(op.Mul(size, size))), size)
        scaled = op.Where(op.Less(size, op.like(size, ERFC_COEFFICIENTS_LIMIT)), scaled, beyond)
    return op.Mul(shrunk, scaled)


def _scale_erfc_tail(op, inverse):
    """Return ``erfc(x) * exp(x ** 2) * x``, given ``1 / x ** 2``."""
    return op.Sub(
        op.like(inverse, math.pi**-0.5), op.Mul(inverse, _polynomial_quotient(op, inverse, ERFC_TAIL_COEFFICIENTS))
    )


def _polynomial_quotient(op, x, polynomials):
    numerator, denominator = (
        reduce(lambda y, c: op.Add(op.Mul(y, x), op.like(x, c)), p, op.like(x, 0)) for p in polynomials
    )
    return op.Div(numerator, denominator)
