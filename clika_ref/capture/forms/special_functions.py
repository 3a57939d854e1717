"""Special functions as elementwise series and rational functions, computed in float64 and rounded once.

PyTorch has kernels for these, but ONNX has no operators. Each form agrees with PyTorch within a few float32 roundings
(`tests/capture/test_special_functions.py`).
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from clika_ref.torch_internals.operators import OpOverload, while_loop_op

aten = torch.ops.aten

EULER_GAMMA = 0.57721566490153286061

LANCZOS_SHIFT = 7.0

LANCZOS_COEFFICIENTS = (
    *(0.99999999999980993227684700473478, 676.520368121885098567009190444019, -1259.13921672240287047156078755283),
    *(771.3234287776530788486528258894, -176.61502916214059906584551354, 12.507343278686904814458936853),
    *(-0.13857109526572011689554707, 9.984369578019570859563e-6, 1.50563273514931155834e-7),
)
"""Coefficients of Lanczos' series for the gamma function with the shift above.

Source: Godfrey, "A note on the computation of the convergent Lanczos complex Gamma approximation", 2001.
"""

BERNOULLI_NUMBERS = tuple(
    numerator / denominator
    for numerator, denominator in ((1, 6), (-1, 30), (1, 42), (-1, 30), (5, 66), (-691, 2730), (7, 6), (-3617, 510))
)
"""The Bernoulli numbers B_2, B_4, ..., B_16."""

SHIFT_STEPS = 12
"""Terms that are added one by one before an asymptotic series: its argument is then large enough."""

NORMAL_QUANTILE = {
    "center": (
        (
            *(3.3871328727963666080e0, 1.3314166789178437745e2, 1.9715909503065514427e3, 1.3731693765509461125e4),
            *(4.5921953931549871457e4, 6.7265770927008700853e4, 3.3430575583588128105e4, 2.5090809287301226727e3),
        ),
        (
            *(1.0, 4.2313330701600911252e1, 6.8718700749205790830e2, 5.3941960214247511077e3),
            *(2.1213794301586595867e4, 3.9307895800092710610e4, 2.8729085735721942674e4, 5.2264952788528545610e3),
        ),
    ),
    "side": (
        (
            *(1.42343711074968357734e0, 4.63033784615654529590e0, 5.76949722146069140550e0, 3.64784832476320460504e0),
            *(
                1.27045825245236838258e0,
                2.41780725177450611770e-1,
                2.27238449892691845833e-2,
                7.74545014278341407640e-4,
            ),
        ),
        (
            *(1.0, 2.05319162663775882187e0, 1.67638483018380384940e0, 6.89767334985100004550e-1),
            *(
                1.48103976427480074590e-1,
                1.51986665636164571966e-2,
                5.47593808499534494600e-4,
                1.05075007164441684324e-9,
            ),
        ),
    ),
    "tail": (
        (
            *(6.65790464350110377720e0, 5.46378491116411436990e0, 1.78482653991729133580e0, 2.96560571828504891230e-1),
            *(
                2.65321895265761230930e-2,
                1.24266094738807843860e-3,
                2.71155556874348757815e-5,
                2.01033439929228813265e-7,
            ),
        ),
        (
            *(1.0, 5.99832206555887937690e-1, 1.36929880922735805310e-1, 1.48753612908506148525e-2),
            *(
                7.86869131145613259100e-4,
                1.84631831751005468180e-5,
                1.42151175831644588870e-7,
                2.04426310338993978564e-15,
            ),
        ),
    ),
}
"""Numerators and denominators of the normal quantile near the median, far from it and in the tails, lowest power first.

Source: Wichura, "Algorithm AS 241: The percentage points of the normal distribution", Applied Statistics 37, 1988.
"""

SERIES_TERMS = 40
"""Terms of power series of Bessel functions: enough up to `MAX_SERIES_ARGUMENT`."""

MAX_SERIES_ARGUMENT = 12.0
"""Largest argument of power series; asymptotic series serve larger ones."""

MAX_SECOND_KIND_ARGUMENT = 9.0
"""The same for modified functions of the second kind, whose power series cancels more."""

ASYMPTOTIC_TERMS = 12

MIN_LOG_ERFC_ARGUMENT = 5.0
"""Argument from which on the asymptotic series of erfc serves."""

LOG_ERFC_TERMS = 20

MAX_AIRY_ARGUMENT = 6.0
"""Largest argument of the power series of the Airy function."""

AIRY_AT_ZERO = (0.355028053887817239, 0.258819403792806798)
"""``Ai(0)`` and ``-Ai'(0)``. Source: Abramowitz and Stegun, 10.4.4 and 10.4.5."""

MAX_GAMMA_STEPS = 20_000
"""Maximum number of terms of an incomplete gamma function: about eight times the root of its first argument."""

GAMMA_PRECISION = 1e-15
"""Relative size of terms that an incomplete gamma function omits."""


def _polynomial(x: Tensor, coefficients: Sequence[float]) -> Tensor:
    """Evaluate a polynomial by Horner's rule; the first coefficient is that of the lowest power."""
    result = torch.full_like(x, coefficients[-1])
    for coefficient in reversed(coefficients[:-1]):
        result = result * x + coefficient
    return result


def _in_float64(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Make a function of floats round once: operands become float64, and the result has the promoted dtype."""

    @functools.wraps(function)
    def call(*operands: Tensor | float) -> Tensor:
        tensors = [x for x in operands if isinstance(x, Tensor)]
        dtype = functools.reduce(torch.promote_types, (x.dtype for x in tensors))
        dtype = dtype if dtype.is_floating_point else torch.get_default_dtype()
        return function(*(x.double() if isinstance(x, Tensor) else x for x in operands)).to(dtype)

    return call


# Gamma functions


def _log_gamma_above_half(x: Tensor) -> Tensor:
    """``log Gamma(x)`` for x of at least 1/2."""
    shifted = x - 1
    total = torch.full_like(x, LANCZOS_COEFFICIENTS[0])
    for index, coefficient in enumerate(LANCZOS_COEFFICIENTS[1:], 1):
        total = total + coefficient / (shifted + index)
    base = shifted + (LANCZOS_SHIFT + 0.5)
    return (shifted + 0.5) * base.log() - base + total.log() + 0.5 * math.log(2 * math.pi)


def _lgamma(x: Tensor) -> Tensor:
    """``log |Gamma(x)|``: infinite at infinities, at 0 and at negative integers."""
    is_low = x < 0.5
    above = _log_gamma_above_half(torch.where(is_low, 1 - x, x))
    sine = (math.pi * (x - x.round())).sin().abs()
    low = math.log(math.pi) - sine.log() - above
    is_infinite = x.isinf() | ((x <= 0) & (x == x.floor()))
    return torch.where(is_infinite, math.inf, torch.where(is_low, low, above))


def _digamma(x: Tensor) -> Tensor:
    """The derivative of ``log Gamma(x)``: NaN at negative integers, minus infinity with the sign of x at 0."""
    is_low = x < 0.5
    above = torch.where(is_low, 1 - x, x)
    total = torch.zeros_like(x)
    for step in range(SHIFT_STEPS):
        total = total - 1 / (above + step)
    shifted = above + SHIFT_STEPS
    square = shifted.reciprocal().square()
    series = [number / (2 * index) for index, number in enumerate(BERNOULLI_NUMBERS, 1)]
    above = total + shifted.log() - 0.5 / shifted - square * _polynomial(square, series)
    fraction = math.pi * (x - x.round())
    low = above - math.pi * fraction.cos() / fraction.sin()
    found = torch.where(is_low, low, above)
    found = torch.where((x < 0) & (x == x.floor()), math.nan, found)
    return torch.where(x == 0, -x.reciprocal(), found)


def _zeta(x: Tensor | float, q: Tensor | float) -> Tensor:
    """The Hurwitz zeta function ``sum (k + q)^-x``, by the Euler-Maclaurin formula."""
    power, start = torch.broadcast_tensors(
        torch.as_tensor(x, dtype=torch.float64), torch.as_tensor(q, dtype=torch.float64)
    )
    total = torch.zeros_like(start)
    for step in range(SHIFT_STEPS):
        total = total + (start + step) ** -power
    shifted = start + SHIFT_STEPS
    total = total + shifted ** (1 - power) / (power - 1) + 0.5 * shifted**-power
    factor, term = power, shifted ** (-power - 1)
    for index, number in enumerate(BERNOULLI_NUMBERS, 1):
        total = total + number / math.factorial(2 * index) * factor * term
        factor = factor * (power + (2 * index - 1)) * (power + 2 * index)
        term = term / shifted.square()
    is_pole = (start <= 0) & (start == start.floor())
    is_undefined = (power < 1) | ((start < 0) & (power != power.floor()) & ~is_pole)
    found = torch.where((power == 1) | is_pole, math.inf, total)
    return torch.where(is_undefined, math.nan, found)


def _polygamma(n: int, x: Tensor) -> Tensor:
    """The n-th derivative of the digamma function."""
    if n == 0:
        return _digamma(x)
    if n == 1:  # by reflection below 1/2, as PyTorch computes it
        is_low = x < 0.5
        above = _zeta(2.0, torch.where(is_low, 1 - x, x))
        sine = (math.pi * (x - x.round())).sin()
        return torch.where(is_low, (math.pi / sine).square() - above, above)
    return (-1) ** (n + 1) * math.factorial(n) * _zeta(float(n + 1), x)


# Inverses of the error function


def _quantile(center: Tensor, tail: Tensor) -> Tensor:
    """The normal quantile of ``1/2 + center``; ``tail`` is the smaller of the probabilities below and above it."""
    form = NORMAL_QUANTILE
    small = 0.180625 - center.square()
    found = center * _polynomial(small, form["center"][0]) / _polynomial(small, form["center"][1])
    root = (-tail.log()).sqrt()
    side, far = root - 1.6, root - 5
    beside = _polynomial(side, form["side"][0]) / _polynomial(side, form["side"][1])
    beyond = _polynomial(far, form["tail"][0]) / _polynomial(far, form["tail"][1])
    outer = torch.where(root <= 5, beside, beyond) * center.sign()
    found = torch.where(center.abs() <= 0.425, found, outer)
    found = torch.where(tail == 0, center.sign() * math.inf, found)
    return torch.where(tail < 0, math.nan, found)


def _ndtri(p: Tensor) -> Tensor:
    """The normal quantile of a probability."""
    return _quantile(p - 0.5, torch.minimum(p, 1 - p))


def _erfinv(x: Tensor) -> Tensor:
    """The inverse of the error function."""
    return _quantile(x / 2, (1 - x.abs()) / 2) / math.sqrt(2)


# Bessel functions


def _power_series(square: Tensor, order: int, *, sign: int = 1, weights: Sequence[float] = ()) -> Tensor:
    """``sum sign^k weights[k] square^k / (k! (k + order)!)``; the weights are 1 if not given."""
    factorials = [math.factorial(k) * math.factorial(k + order) for k in range(SERIES_TERMS)]
    given = weights or [1.0] * SERIES_TERMS
    return _polynomial(square, [sign**k * w / f for k, (w, f) in enumerate(zip(given, factorials, strict=True))])


def _harmonic_weights(order: int) -> list[float]:
    """``psi(k + 1) + psi(k + order + 1)`` for each k of a series."""
    harmonic = [0.0, *itertools.accumulate(1 / k for k in range(1, SERIES_TERMS + order))]
    return [harmonic[k] + harmonic[k + order] - 2 * EULER_GAMMA for k in range(SERIES_TERMS)]


def _hankel_coefficients(order: int) -> list[float]:
    """Coefficients a_k of the asymptotic series of Bessel functions in ``1 / x``."""
    found = [1.0]
    for k in range(1, 2 * ASYMPTOTIC_TERMS):
        found.append(found[-1] * (4 * order**2 - (2 * k - 1) ** 2) / (8 * k))
    return found


def _modified_first_kind(x: Tensor, order: int, *, is_scaled: bool) -> Tensor:
    """``I_order(x)``, times ``exp(-|x|)`` if scaled."""
    size = x.abs()
    small, large = size.clamp(max=MAX_SERIES_ARGUMENT), size.clamp(min=MAX_SERIES_ARGUMENT)
    near = (small / 2) ** order * _power_series(small.square() / 4, order)
    signs = [(-1) ** k * a for k, a in enumerate(_hankel_coefficients(order))]
    far = _polynomial(large.reciprocal(), signs) / (2 * math.pi * large).sqrt()
    near, far = (near * (-small).exp(), far) if is_scaled else (near, far * large.exp())
    found = torch.where(size <= MAX_SERIES_ARGUMENT, near, far)
    found = torch.where(size.isinf(), 0.0 if is_scaled else math.nan, found)  # as PyTorch's kernels
    return found * x.sign() if order % 2 else found


def _modified_second_kind(x: Tensor, order: int, *, is_scaled: bool) -> Tensor:
    """``K_order(x)`` of order 0 or 1, times ``exp(x)`` if scaled; infinite at 0 and NaN below."""
    limit = MAX_SECOND_KIND_ARGUMENT
    small, large = x.clamp(1e-300, limit), x.clamp(min=limit)
    square = small.square() / 4
    logarithm = (small / 2).log()
    inner = _power_series(square, order, weights=_harmonic_weights(order)) * (small / 2) ** order / 2
    first = _power_series(square, order) * (small / 2) ** order
    near = inner - logarithm * first if order == 0 else small.reciprocal() + logarithm * first - inner
    far = _polynomial(large.reciprocal(), _hankel_coefficients(order)) * (math.pi / (2 * large)).sqrt()
    near, far = (near * small.exp(), far) if is_scaled else (near, far * (-large).exp())
    found = torch.where(x <= limit, near, far)
    return torch.where(x > 0, found, torch.where(x == 0, math.inf, math.nan))


def _phase_and_amplitudes(x: Tensor, order: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The sine and the cosine of the phase of a Bessel function for large x, and both amplitudes."""
    coefficients = _hankel_coefficients(order)
    square = x.reciprocal().square()
    even = _polynomial(square, [(-1) ** k * a for k, a in enumerate(coefficients[::2])])
    odd = _polynomial(square, [(-1) ** k * a for k, a in enumerate(coefficients[1::2])]) / x
    phase = x - (order / 2 + 0.25) * math.pi
    scale = (2 / (math.pi * x)).sqrt()
    return phase.sin(), phase.cos(), even * scale, odd * scale


def _first_kind(x: Tensor, order: int) -> Tensor:
    """``J_order(x)``."""
    size = x.abs()
    small, large = size.clamp(max=MAX_SERIES_ARGUMENT), size.clamp(min=MAX_SERIES_ARGUMENT)
    near = (small / 2) ** order * _power_series(small.square() / 4, order, sign=-1)
    sine, cosine, even, odd = _phase_and_amplitudes(large, order)
    found = torch.where(size <= MAX_SERIES_ARGUMENT, near, cosine * even - sine * odd)
    return found * x.sign() if order % 2 else found


def _second_kind(x: Tensor, order: int) -> Tensor:
    """``Y_order(x)`` of order 0 or 1: minus infinity at 0 and NaN below."""
    small, large = x.clamp(1e-300, MAX_SERIES_ARGUMENT), x.clamp(min=MAX_SERIES_ARGUMENT)
    square = small.square() / 4
    inner = _power_series(square, order, sign=-1, weights=_harmonic_weights(order)) * (small / 2) ** order
    first = _power_series(square, order, sign=-1) * (small / 2) ** order
    near = (2 * (small / 2).log() * first - inner) / math.pi
    near = near if order == 0 else near - 2 / (math.pi * small)
    sine, cosine, even, odd = _phase_and_amplitudes(large, order)
    found = torch.where(x <= MAX_SERIES_ARGUMENT, near, sine * even + cosine * odd)
    return torch.where(x > 0, found, torch.where(x == 0, -math.inf, math.nan))


# Integrals


def _log_ndtr(x: Tensor) -> Tensor:
    """The logarithm of the normal distribution; far below the mean by the asymptotic series of erfc."""
    size = -x / math.sqrt(2)
    far = size.clamp(min=MIN_LOG_ERFC_ARGUMENT)
    inverse = 0.5 * far.reciprocal().square()
    coefficients = itertools.accumulate(range(1, 2 * LOG_ERFC_TERMS, 2), lambda c, k: -c * k, initial=1.0)
    below = _polynomial(inverse, list(coefficients)).log() - (2 * math.sqrt(math.pi) * far).log() - far.square()
    near = (torch.erfc(size.clamp(max=MIN_LOG_ERFC_ARGUMENT)) / 2).log()
    above = (-torch.erfc(-size) / 2).log1p()
    return torch.where(size > MIN_LOG_ERFC_ARGUMENT, below, torch.where(x < 1, near, above))


def _airy_ai(x: Tensor) -> Tensor:
    """The Airy function ``Ai(x)``, by power series near 0 and asymptotic series elsewhere; NaN at infinities.

    Source: Abramowitz and Stegun, "Handbook of Mathematical Functions", 10.4.2, 10.4.59 and 10.4.60.
    """
    small, large = x.clamp(-MAX_AIRY_ARGUMENT, MAX_AIRY_ARGUMENT), x.abs().clamp(min=MAX_AIRY_ARGUMENT)
    cube = small**3
    series = [
        itertools.accumulate(
            range(1, SERIES_TERMS), lambda c, k, shift=shift: c / ((3 * k + shift) * (3 * k + shift - 1)), initial=1.0
        )
        for shift in (0, 1)
    ]
    first, second = (_polynomial(cube, list(coefficients)) for coefficients in series)
    near = AIRY_AT_ZERO[0] * first - AIRY_AT_ZERO[1] * small * second
    phase = 2 / 3 * large * large.sqrt()
    weights = list(
        itertools.accumulate(
            range(1, 2 * ASYMPTOTIC_TERMS),
            lambda c, k: c * (6 * k - 5) * (6 * k - 3) * (6 * k - 1) / (216 * k * (2 * k - 1)),
            initial=1.0,
        )
    )
    inverse, scale = phase.reciprocal(), math.pi**-0.5 * large**-0.25
    decaying = _polynomial(-inverse, weights) * scale / 2 * (-phase).exp()
    even, odd = (_polynomial(-inverse.square(), weights[start::2]) for start in (0, 1))
    shifted = phase + math.pi / 4
    oscillating = scale * (shifted.sin() * even - shifted.cos() * odd * inverse)
    found = torch.where(x.abs() <= MAX_AIRY_ARGUMENT, near, torch.where(x > 0, decaying, oscillating))
    return torch.where(x.isinf(), math.nan, found)


def _sum_lower_gamma(a: Tensor, x: Tensor) -> Tensor:
    """``sum x^k / ((a + 1) ... (a + k))``, for x below ``a + 1``."""

    def is_running(k: Tensor, term: Tensor, total: Tensor, *_: Tensor) -> Tensor:
        return (k < MAX_GAMMA_STEPS) & (term > GAMMA_PRECISION * total).any()

    def add(k: Tensor, term: Tensor, total: Tensor, a: Tensor, x: Tensor) -> tuple[Tensor, ...]:
        following = term * x / (a + k)
        return k + 1, following, total + following

    ones = torch.ones_like(x)
    initial: Any = (ones.new_ones(()), ones, ones.clone())
    return while_loop_op(is_running, add, initial, (a, x))[2]


def _divide_upper_gamma(a: Tensor, x: Tensor) -> Tensor:
    """Legendre's continued fraction ``1 / (x + 1 - a - 1 (1 - a) / (x + 3 - a - ...))``, for x of at least ``a + 1``.

    Source: Lentz, "Generating Bessel functions in Mie scattering calculations using continued fractions", 1976.
    """

    def is_running(k: Tensor, ratio: Tensor, *_: Tensor) -> Tensor:
        return (k < MAX_GAMMA_STEPS) & ((ratio - 1).abs() > GAMMA_PRECISION).any()

    def multiply(  # noqa: PLR0917 - the state of the loop and its operands
        k: Tensor, _ratio: Tensor, c: Tensor, d: Tensor, found: Tensor, a: Tensor, x: Tensor
    ) -> tuple[Tensor, ...]:
        numerator, base = k * (a - k), x + (2 * k + 1) - a
        c, d = base + numerator / c, (base + numerator * d).reciprocal()
        return k + 1, c * d, c, d, found * c * d

    first = (x + 1 - a).reciprocal()
    initial: Any = (x.new_ones(()), torch.full_like(x, 2.0), torch.full_like(x, 1e300), first, first.clone())
    return while_loop_op(is_running, multiply, initial, (a, x))[4]


def _incomplete_gamma(a: Tensor, x: Tensor, *, is_upper: bool) -> Tensor:
    """The regularized incomplete gamma function of positive a and x, from 0 to x or from x up."""
    a, x = torch.broadcast_tensors(a, x)
    is_regular = (a > 0) & (x > 0) & a.isfinite() & x.isfinite()
    is_low = is_regular & (x < a + 1)
    is_high = is_regular & ~is_low
    power = (a * x.log() - x - _lgamma(a)).exp()
    lower = power / a * _sum_lower_gamma(torch.where(is_low, a, 1.0), torch.where(is_low, x, 0.0))
    upper = power * _divide_upper_gamma(torch.where(is_high, a, 1.0), torch.where(is_high, x, 2.0))
    found = torch.where(is_low, 1 - lower if is_upper else lower, upper if is_upper else 1 - upper)
    is_one = (x.isinf() | (a == 0)) & (x > 0)
    edge = torch.where(is_one, 0.0 if is_upper else 1.0, 1.0 if is_upper else 0.0)
    is_unknown = (a.isnan() & (x != 0) & ~x.isinf()) | (x.isnan() & ~a.isinf())
    is_undefined = is_unknown | (a < 0) | (x < 0) | ((a == 0) & (x == 0)) | (a.isinf() & x.isinf())
    return torch.where(is_undefined, math.nan, torch.where(is_regular, found, edge))


def _spherical_j0(x: Tensor) -> Tensor:
    """``sin(x) / x``."""
    return torch.where(x == 0, 1.0, torch.where(x.isinf(), 0.0, x.sin() / x))


_FORMS: dict[OpOverload, Callable[..., Tensor]] = {
    aten.lgamma.default: _lgamma,
    aten.digamma.default: _digamma,
    aten.polygamma.default: _polygamma,
    aten.special_zeta.default: _zeta,
    aten.special_zeta.self_scalar: _zeta,
    aten.special_zeta.other_scalar: _zeta,
    aten.erfinv.default: _erfinv,
    aten.special_ndtri.default: _ndtri,
    aten.i0.default: functools.partial(_modified_first_kind, order=0, is_scaled=False),
    aten.special_modified_bessel_i0.default: functools.partial(_modified_first_kind, order=0, is_scaled=False),
    aten.special_i0e.default: functools.partial(_modified_first_kind, order=0, is_scaled=True),
    aten.special_i1.default: functools.partial(_modified_first_kind, order=1, is_scaled=False),
    aten.special_modified_bessel_i1.default: functools.partial(_modified_first_kind, order=1, is_scaled=False),
    aten.special_i1e.default: functools.partial(_modified_first_kind, order=1, is_scaled=True),
    aten.special_modified_bessel_k0.default: functools.partial(_modified_second_kind, order=0, is_scaled=False),
    aten.special_modified_bessel_k1.default: functools.partial(_modified_second_kind, order=1, is_scaled=False),
    aten.special_scaled_modified_bessel_k0.default: functools.partial(_modified_second_kind, order=0, is_scaled=True),
    aten.special_scaled_modified_bessel_k1.default: functools.partial(_modified_second_kind, order=1, is_scaled=True),
    aten.special_bessel_j0.default: functools.partial(_first_kind, order=0),
    aten.special_bessel_j1.default: functools.partial(_first_kind, order=1),
    aten.special_bessel_y0.default: functools.partial(_second_kind, order=0),
    aten.special_bessel_y1.default: functools.partial(_second_kind, order=1),
    aten.special_spherical_bessel_j0.default: _spherical_j0,
    aten.special_log_ndtr.default: _log_ndtr,
    aten.special_airy_ai.default: _airy_ai,
    aten.igamma.default: functools.partial(_incomplete_gamma, is_upper=False),
    aten.igammac.default: functools.partial(_incomplete_gamma, is_upper=True),
}

SPECIAL_FUNCTIONS = {overload: _in_float64(form) for overload, form in _FORMS.items()}
"""Forms of special functions, by the call of PyTorch that they replace."""
