"""ONNX's Erf, and what takes its place in float64, for which ONNX Runtime has no kernel."""

from __future__ import annotations

from functools import reduce

import torch

SMALL = 0.46875
"""Up to here erf is computed itself, beyond as ``1 - erfc``, since a difference keeps no digits of what is near 0."""

LARGE = 6.0
"""From here on erf is 1 in float64, while the quotient of powers would be infinite at last."""

NEAR = (
    (1.85777706184603153e-1, 3.16112374387056560, 1.13864154151050156e2, 3.77485237685302021e2, 3.20937758913846947e3),
    (1.0, 2.36012909523441209e1, 2.44024637934444173e2, 1.28261652607737228e3, 2.84423683343917062e3),
)
"""Numerator and denominator of ``erf(x) / x`` in powers of ``x ** 2``, the highest first.

Source: Cody, "Rational Chebyshev Approximations for the Error Function", as in his CALERF (netlib, specfun).
"""

FAR = (
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
"""Those of ``erfc(x) * exp(x ** 2)`` in powers of ``x``. Source: as `NEAR`."""


def error_function(op, x):
    """Return ``erf(x)``: one node, or in float64 the two quotients of polynomials it is made of."""
    if op.dtype(x) != torch.float64:
        return op.Erf(x)
    size = op.Abs(x)
    square = op.Mul(x, x)
    near = op.Mul(x, _quotient(op, square, NEAR))
    far = op.Sub(op.like(x, 1), op.Mul(op.Exp(op.Neg(square)), _quotient(op, size, FAR)))
    inner = op.Where(op.Less(size, op.like(x, SMALL)), near, op.Mul(op.Sign(x), far))
    return op.Where(op.Greater(size, op.like(x, LARGE)), op.Sign(x), inner)


def _quotient(op, x, polynomials):
    numerator, denominator = (
        reduce(lambda y, c: op.Add(op.Mul(y, x), op.like(x, c)), p, op.like(x, 0)) for p in polynomials
    )
    return op.Div(numerator, denominator)
