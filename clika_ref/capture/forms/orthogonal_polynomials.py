"""Orthogonal polynomials of any degree: Chebyshev's in closed form, the others by their recurrences.

Degrees may differ between elements and are truncated to integers, as in PyTorch's kernels. A loop runs to the largest.

Source: Abramowitz and Stegun, "Handbook of Mathematical Functions", 22.2 to 22.7.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from clika_ref.torch_internals.operators import OpOverload, while_loop_op

aten = torch.ops.aten

MAX_HERMITE_DEGREES = {torch.float64: 512}
"""Largest degrees of Hermite polynomials by dtype; PyTorch's kernels return NaN above."""

MAX_HERMITE_DEGREE = 128
"""The same for other dtypes."""


def _as_operands(x: Tensor | float, n: Tensor | float) -> tuple[Tensor, Tensor]:
    """Return the argument and the degree as float64 tensors of one shape."""
    wide = (torch.as_tensor(t, dtype=torch.float64) for t in (x, n))
    argument, degree = torch.broadcast_tensors(*wide)
    return argument, degree.trunc()


def _find_sign(x: Tensor, n: Tensor) -> Tensor:
    """``sign(x)^n``, with 1 as the sign of 0."""
    return torch.where((x < 0) & (n.remainder(2) == 1), -1.0, 1.0)


def _chebyshev_t(x: Tensor, n: Tensor) -> Tensor:
    """``cos(n acos x)`` inside [-1, 1], and its continuation outside."""
    size = x.abs()
    inside = (n * x.clamp(-1, 1).acos()).cos()
    outside = (n * size.clamp(min=1).acosh()).cosh() * _find_sign(x, n)
    return torch.where(size <= 1, inside, outside)


def _divide_sines(x: Tensor, multiple: Tensor, share: float) -> Tensor:
    """``sin(multiple t) / sin(share t)`` of ``t = acos x`` for x of at least 0, and its continuation above 1."""
    angle, growth = x.clamp(max=1).acos(), x.clamp(min=1).acosh()
    is_inside = x <= 1
    above = torch.where(is_inside, (multiple * angle).sin(), (multiple * growth).sinh())
    below = torch.where(is_inside, (share * angle).sin(), (share * growth).sinh())
    is_one = x == 1
    return torch.where(is_one, multiple / share, above / torch.where(is_one, 1.0, below))


def _chebyshev_u(x: Tensor, n: Tensor) -> Tensor:
    """``sin((n + 1) t) / sin t`` of ``t = acos x``."""
    return _divide_sines(x.abs(), n + 1, 1.0) * _find_sign(x, n)


def _divide_half_cosines(x: Tensor, n: Tensor) -> Tensor:
    """``cos((n + 1/2) t) / cos(t / 2)`` of ``t = acos x`` for x of at least 0, and its continuation above 1."""
    angle, growth = x.clamp(max=1).acos(), x.clamp(min=1).acosh()
    inside = ((n + 0.5) * angle).cos() / (angle / 2).cos()
    return torch.where(x <= 1, inside, ((n + 0.5) * growth).cosh() / (growth / 2).cosh())


def _chebyshev_v(x: Tensor, n: Tensor) -> Tensor:
    """``cos((n + 1/2) t) / cos(t / 2)`` of ``t = acos x``; for negative x by the fourth kind of ``-x``."""
    size = x.abs()
    return torch.where(x >= 0, _divide_half_cosines(size, n), _divide_sines(size, n + 0.5, 0.5) * _find_sign(x, n))


def _chebyshev_w(x: Tensor, n: Tensor) -> Tensor:
    """``sin((n + 1/2) t) / sin(t / 2)`` of ``t = acos x``; for negative x by the third kind of ``-x``."""
    return _chebyshev_v(-x, n) * torch.where(n.remainder(2) == 1, -1.0, 1.0)


def _iterate_recurrence(
    x: Tensor, n: Tensor, first: Tensor, step: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
) -> Tensor:
    """Return the polynomials of degree n, given that of degree 1, and the next one of x, k and the last two."""

    def has_next(k: Tensor, _last: Tensor, _before: Tensor, _found: Tensor, _x: Tensor, degree: Tensor) -> Tensor:
        return k < degree.amax()

    def find_next(  # noqa: PLR0917 - the state of the loop and its operands
        k: Tensor, last: Tensor, before: Tensor, found: Tensor, argument: Tensor, degree: Tensor
    ) -> tuple[Tensor, ...]:
        following = step(argument, k, last, before)
        return k + 1, following, last.clone(), torch.where(degree == k + 1, following, found)

    ones = torch.ones_like(x)
    found = torch.where(n == 0, 1.0, first)
    if not x.numel():
        return found
    initial: Any = (torch.ones((), dtype=x.dtype, device=x.device), first, ones, found)
    return while_loop_op(has_next, find_next, initial, (x, n))[3]


def _hermite_h(x: Tensor, n: Tensor) -> Tensor:
    return _iterate_recurrence(x, n, 2 * x, lambda x, k, last, before: 2 * (x * last - k * before))


def _hermite_he(x: Tensor, n: Tensor) -> Tensor:
    return _iterate_recurrence(x, n, x.clone(), lambda x, k, last, before: x * last - k * before)


def _laguerre_l(x: Tensor, n: Tensor) -> Tensor:
    return _iterate_recurrence(x, n, 1 - x, lambda x, k, last, before: ((2 * k + 1 - x) * last - k * before) / (k + 1))


def _legendre_p(x: Tensor, n: Tensor) -> Tensor:
    return _iterate_recurrence(
        x, n, x.clone(), lambda x, k, last, before: ((2 * k + 1) * x * last - k * before) / (k + 1)
    )


def _make_form(
    function: Callable[[Tensor, Tensor], Tensor], *, is_shifted: bool, is_limited: bool
) -> Callable[..., Tensor]:
    """Return the form of a polynomial: 0 for negative degrees, of ``2 x - 1`` if shifted; NaN above Hermite's limit."""

    @functools.wraps(function)
    def call(x: Tensor | float, n: Tensor | float) -> Tensor:
        argument, degree = _as_operands(x, n)
        tensors = [t.dtype for t in (x, n) if isinstance(t, Tensor)]
        dtype = functools.reduce(torch.promote_types, tensors)
        dtype = dtype if dtype.is_floating_point else torch.get_default_dtype()
        limit = MAX_HERMITE_DEGREES.get(dtype, MAX_HERMITE_DEGREE)
        known = degree.clamp(max=limit) if is_limited else degree
        found = function(2 * argument - 1 if is_shifted else argument, known.clamp(min=0))
        found = torch.where(degree > limit, math.nan, found) if is_limited else found
        return torch.where(degree < 0, 0.0, found).to(dtype)

    return call


_FUNCTIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "chebyshev_polynomial_t": _chebyshev_t,
    "chebyshev_polynomial_u": _chebyshev_u,
    "chebyshev_polynomial_v": _chebyshev_v,
    "chebyshev_polynomial_w": _chebyshev_w,
    "shifted_chebyshev_polynomial_t": _chebyshev_t,
    "shifted_chebyshev_polynomial_u": _chebyshev_u,
    "shifted_chebyshev_polynomial_v": _chebyshev_v,
    "shifted_chebyshev_polynomial_w": _chebyshev_w,
    "hermite_polynomial_h": _hermite_h,
    "hermite_polynomial_he": _hermite_he,
    "laguerre_polynomial_l": _laguerre_l,
    "legendre_polynomial_p": _legendre_p,
}

POLYNOMIAL_FORMS: dict[OpOverload, Callable[..., Tensor]] = {
    getattr(getattr(aten, f"special_{name}"), overload): _make_form(
        function, is_shifted=name.startswith("shifted"), is_limited=name.startswith("hermite")
    )
    for name, function in _FUNCTIONS.items()
    for overload in ("default", "x_scalar", "n_scalar")
}
"""Forms by the call of PyTorch that they replace."""
