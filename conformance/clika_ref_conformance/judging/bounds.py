"""Error bounds of one call: the largest distance of a correct result from the exact one, by dtype and error class."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from clika_ref.core.accuracy import ErrorClass
from clika_ref_conformance.judging.formats import Formats
from clika_ref_conformance.judging.rounding import (
    AnyFormat,
    ConcreteCall,
    limits_of,
    map_floats,
    rounding_unit_of,
    smallest_step_of,
    ulp_of,
)

COORDINATE_ULPS = 4
"""Rounding errors in a coordinate of an interpolation: scale, shift, product."""
INTERPOLATION_TAPS = 16
"""Number of neighbors in the widest interpolation (cubic, two dims)."""
EXP_ULPS = 8
"""Error of an exponential or a logarithm, as in the class ``ulp``."""


@dataclass(frozen=True, slots=True)
class DotStatistics:
    """Data for the statistics of a sum of products: ``terms[...]`` summed, and ``weight[...] = sum |x| |w|``.

    ``format_error[...]`` is the error from rounding operands and results, if they have formats of their own.
    """

    terms: torch.Tensor
    weight: torch.Tensor
    formats: Formats
    format_error: torch.Tensor | None = None

    @property
    def variance(self) -> torch.Tensor:
        """Variance of the sum relative to that of one rounding, ``(u weight)^2``: one for each term."""
        if self.format_error is None:
            return self.terms
        return self.terms + (self.format_error / (rounding_unit_of(self.formats.accumulate) * self.weight)).square()


def bound_ulps(call: ConcreteCall, result: torch.Tensor, dtype: AnyFormat, error: ErrorClass) -> torch.Tensor:
    """Compute ``n * ulp(max(|y|, companion))``; the companion is a number or the first operand."""
    at = result.abs()
    if error.companion == "x":
        at = torch.maximum(at, _companion_of(call, result))
    elif error.companion is not None:
        at = at.clamp(min=float(error.companion))
    return error.ulps * ulp_of(at, dtype)


def _companion_of(call: ConcreteCall, result: torch.Tensor) -> torch.Tensor:
    """Return ``|x|`` of the first operand per element of the result, or its maximum if the shapes do not fit."""
    x = _zero_nonfinite(call.first.abs())
    try:
        return x.expand_as(result)
    except RuntimeError:
        return torch.full_like(result, float(x.amax()) if x.numel() else 0.0)


def compute_dot_statistics(call: ConcreteCall, results: list[torch.Tensor], formats: Formats) -> list[DotStatistics]:
    """Run the call on absolute values, for ``sum |x| |w|``, and on ones, for the number of terms.

    If operands are rounded, the call runs again on absolute values that are one ulp larger. An average of ones is one
    for any number of terms, so there are at least as many terms as operand elements per result element. Integers that
    are summed to floats count as the floats that they are converted to. Infinities and NaN count as zero, as rounding
    does not change their effect on a sum. An infinite weight therefore means that a sum of finite terms may overflow.
    """
    if not call.floats:
        call = _convert_to_floats(call)
    weights = _change_operands(call, abs, lambda x: _zero_nonfinite(x.abs())).run()
    ones = _change_operands(call, lambda _: 1, torch.ones_like).run()
    found: list[DotStatistics] = []
    larger = (
        _change_operands(call, abs, lambda x: formats.add_ulp(_zero_nonfinite(x))).run()
        if formats.rounds_operands
        else weights
    )
    for result, weight, one, more in zip(results, weights, ones, larger, strict=True):
        fewest = _count_min_terms(call, result)
        terms = one.double().abs().nan_to_num(1.0, 1.0).clamp(min=fewest) + 1
        size = weight.double().abs()
        format_error = None
        if not formats.is_plain:
            moved = (more.double().abs() - size).nan_to_num(math.inf) if formats.rounds_operands else 0.0
            format_error = moved + ulp_of(result, formats.stored) / 2
        found.append(DotStatistics(terms, size, formats, format_error))
    return found


def _convert_to_floats(call: ConcreteCall) -> ConcreteCall:
    """Return a call with its integer tensors in float64: all of them, or else the last one that is not an index."""
    positions = [i for i, o in enumerate(call.operands) if isinstance(o, torch.Tensor)]
    for chosen in (positions, *([i] for i in reversed(positions))):
        operands = tuple(o.double() if i in chosen else o for i, o in enumerate(call.operands))
        changed = ConcreteCall(call.name, call.function, operands, call.attrs)
        try:
            changed.run()
        except (RuntimeError, TypeError, ValueError):  # the operand is an index
            continue
        return changed
    return call


def _change_operands(call: ConcreteCall, number: Any, tensor: Any) -> ConcreteCall:
    """Return the call with its factors (``alpha``, ``beta``) and its floating tensors changed."""
    attrs = {k: number(v) if k in ("alpha", "beta") else v for k, v in call.attrs.items()}
    return ConcreteCall(call.name, call.function, map_floats(call.operands, tensor), attrs)


def _count_min_terms(call: ConcreteCall, result: torch.Tensor) -> float:
    kernel = call.attribute("kernel_size", 1)
    if isinstance(kernel, list | tuple) and all(isinstance(k, int) for k in kernel):
        return float(math.prod(kernel))
    largest = max((t.numel() for t in call.floats), default=1)
    return max(1.0, math.ceil(largest / max(result.numel(), 1)))


def bound_dot(found: DotStatistics, result: torch.Tensor) -> torch.Tensor:
    """Compute ``K u sum |x| |w|`` plus the rounding of operands and result; infinite if a partial sum may overflow."""
    formats = found.formats
    bound = found.terms * rounding_unit_of(formats.accumulate) * found.weight
    bound += ulp_of(result, formats.stored) / 2 if found.format_error is None else found.format_error
    if not formats.is_plain:  # terms below the smallest number underflow
        bound += found.terms * smallest_step_of(formats.accumulate)
    return torch.where(found.weight > limits_of(formats.accumulate).max, math.inf, bound)


def bound_softmax(call: ConcreteCall, result: torch.Tensor, dtype: AnyFormat) -> torch.Tensor:
    """Bound the error of ``exp(x - max x)``, a sum of ``K`` such terms, and a quotient or a logarithm.

    Relative for a softmax: ``8 + K + |x - max x|`` units and as many again for the sum. Absolute for a logarithm:
    ``K + 8`` units and 8 ulp of the largest element of the row, since the logarithm is subtracted from it.
    """
    x, u = _zero_nonfinite(call.first), rounding_unit_of(dtype)
    dim: Any = call.attribute("dim", 1)
    if x.numel() == 0:
        return torch.zeros_like(result)
    if x.ndim == 0:
        return EXP_ULPS * ulp_of(torch.maximum(result.abs(), x.abs()), dtype)
    keepdim = result.ndim == x.ndim
    top = x.abs().amax(dim, keepdim=keepdim)
    terms = x.numel() / max(top.numel(), 1)
    if "log" in call.name:
        return (terms + EXP_ULPS) * u + EXP_ULPS * ulp_of(torch.maximum(result.abs(), top.expand_as(result)), dtype)
    below = x.amax(dim, keepdim=True) - x
    return result.abs() * u * (2 * EXP_ULPS + terms + 2 * below) + EXP_ULPS * ulp_of(result * 0, dtype)


def bound_interpolation(call: ConcreteCall, result: torch.Tensor, dtype: AnyFormat) -> torch.Tensor:
    """Compute ``K u max |x|`` over the image, plus the effect of coordinate errors of 4 ulp."""
    x = _zero_nonfinite(call.first)
    if x.numel() == 0 or result.numel() == 0:
        return torch.zeros_like(result)
    spatial_dims = tuple(range(2, x.ndim))
    top, spread = (
        x.abs().amax(spatial_dims, keepdim=True),
        x.amax(spatial_dims, keepdim=True) - x.amin(spatial_dims, keepdim=True),
    )
    taps = INTERPOLATION_TAPS * max(1.0, x.numel() / result.numel())
    moved = 2 * COORDINATE_ULPS * max(*x.shape[2:], *result.shape[2:]) * spread
    return (rounding_unit_of(dtype) * (taps * 2 * top + moved)).expand_as(result) + ulp_of(result, dtype)


def bound_variance(call: ConcreteCall, results: list[torch.Tensor], dtype: AnyFormat) -> list[torch.Tensor]:
    """Bound ``var``, ``std``, ``var_mean`` and ``std_mean``: ``2 K u mean(x^2)``, also valid for one-pass algorithms.

    The squared mean is part of the bound because it is subtracted. A standard deviation is bounded by the square roots
    of the interval's limits. The mean has no limit if there is an infinity: eager subtracts it and returns NaN.
    """
    x, u = call.first, rounding_unit_of(dtype)
    first = _zero_nonfinite(results[0].abs())
    terms = x.numel() / max(first.numel(), 1)
    square = _zero_nonfinite(x).square()
    dims = get_variance_dims(call)
    mean = square.mean(dims, keepdim=first.ndim == x.ndim).reshape(first.shape)
    correction = call.attrs.get("correction", 1)
    grown = terms / max(terms - (1 if correction is None else float(correction)), 1)
    slack = 2 * (terms + 2) * u * mean * grown
    if "std" in call.name:
        squared = first.square()
        slack = (squared + slack).sqrt() - (squared - slack).clamp(min=0).sqrt()
    bounds = [slack + EXP_ULPS * ulp_of(first, dtype)]
    if len(results) > 1:
        at = x.abs().mean(dims, keepdim=first.ndim == x.ndim).reshape(first.shape)
        bounds.append((terms + 1) * u * at + ulp_of(results[1], dtype))
    return bounds


def get_variance_dims(call: ConcreteCall) -> tuple[int, ...]:
    """Return the dims that a variance reduces, from the arguments of its operator or of ATen's overloads."""
    dim = next((v for v in (call.attrs.get("dim"), *call.operands[1:2]) if v is not None), None)
    return tuple(range(call.first.ndim)) if dim is None or dim in ((), []) else dim


def _zero_nonfinite(x: torch.Tensor) -> torch.Tensor:
    return x.nan_to_num(0.0, 0.0, 0.0)
