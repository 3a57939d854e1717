"""Bounds of one call: how far a correct result in a given dtype may lie from the exact one, by its error class."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from clika_ref.core.accuracy import ErrorClass
from clika_ref_conformance.judging.formats import Formats
from clika_ref_conformance.judging.rounding import AnyFormat, Call, limits_of, mapped, step_of, ulp_of, unit_of

COORDINATE_ULPS = 4
"""Roundings in a coordinate of an interpolation: scale, shift, product."""
TAPS = 16
"""Neighbours that the widest interpolation (cubic, two sides) weighs."""
EXP_ULPS = 8
"""Of an exponential or a logarithm, as in the class ``ulp``."""


@dataclass(frozen=True, slots=True)
class Products:
    """What the statistics of a sum of products need: ``terms[...]`` summed, and ``weight[...] = sum |x| |w|``.

    ``beside[...]`` is how far roundings of operands and of the result move it, where those have formats of their own.
    """

    terms: torch.Tensor
    weight: torch.Tensor
    formats: Formats
    beside: torch.Tensor | None = None

    @property
    def variance(self) -> torch.Tensor:
        """Variance of the sum over that of one rounding, ``(u weight)^2``: one for each term."""
        if self.beside is None:
            return self.terms
        return self.terms + (self.beside / (unit_of(self.formats.accumulate) * self.weight)).square()


def ulps(call: Call, result: torch.Tensor, dtype: AnyFormat, error: ErrorClass) -> torch.Tensor:
    """``n * ulp(max(|y|, companion))``, the companion being a number or the first operand."""
    at = result.abs()
    if error.companion == "x":
        at = torch.maximum(at, _companion(call, result))
    elif error.companion is not None:
        at = at.clamp(min=float(error.companion))
    return error.ulps * ulp_of(at, dtype)


def _companion(call: Call, result: torch.Tensor) -> torch.Tensor:
    """Return ``|x|`` of the first operand per element of the result, or its maximum where the shapes do not fit."""
    x = _finite(call.first.abs())
    try:
        return x.expand_as(result)
    except RuntimeError:
        return torch.full_like(result, float(x.amax()) if x.numel() else 0.0)


def products(call: Call, results: list[torch.Tensor], formats: Formats) -> list[Products]:
    """Run the call on absolute values, for ``sum |x| |w|``, and on ones, for the number of terms.

    Where operands are rounded, it is run once more on absolute values that are an ulp larger. An average of ones is
    one, however many there are: it has as many terms as elements fall on one result. Integers that are summed to floats
    weigh as the floats that they become. Infinities and NaN weigh nothing: what they make of a sum, rounding leaves as
    it is, while an infinite weight says that a sum of finite terms may overflow.
    """
    if not call.floats:
        call = _of_floats(call)
    weights = _scaled(call, abs, lambda x: _finite(x.abs())).run()
    ones = _scaled(call, lambda _: 1, torch.ones_like).run()
    found: list[Products] = []
    larger = _scaled(call, abs, lambda x: formats.raised(_finite(x))).run() if formats.rounds_operands else weights
    for result, weight, one, more in zip(results, weights, ones, larger, strict=True):
        fewest = _averaged(call, result)
        terms = one.double().abs().nan_to_num(1.0, 1.0).clamp(min=fewest) + 1
        size = weight.double().abs()
        beside = None
        if not formats.are_plain:
            moved = (more.double().abs() - size).nan_to_num(math.inf) if formats.rounds_operands else 0.0
            beside = moved + ulp_of(result, formats.stored) / 2
        found.append(Products(terms, size, formats, beside))
    return found


def _of_floats(call: Call) -> Call:
    """Return a call on integers with those in float64 that may be: all, or else the last that is no index."""
    places = [i for i, o in enumerate(call.operands) if isinstance(o, torch.Tensor)]
    for chosen in (places, *([i] for i in reversed(places))):
        operands = tuple(o.double() if i in chosen else o for i, o in enumerate(call.operands))
        changed = Call(call.name, call.function, operands, call.attrs)
        try:
            changed.run()
        except (RuntimeError, TypeError, ValueError):  # an index must be an integer
            continue
        return changed
    return call


def _scaled(call: Call, number: Any, tensor: Any) -> Call:
    """Return the call with its factors (``alpha``, ``beta``) and its floating tensors changed."""
    attrs = {k: number(v) if k in ("alpha", "beta") else v for k, v in call.attrs.items()}
    return Call(call.name, call.function, mapped(call.operands, tensor), attrs)


def _averaged(call: Call, result: torch.Tensor) -> float:
    kernel = call.attribute("kernel_size", 1)
    if isinstance(kernel, list | tuple) and all(isinstance(k, int) for k in kernel):
        return float(math.prod(kernel))
    largest = max((t.numel() for t in call.floats), default=1)
    return max(1.0, math.ceil(largest / max(result.numel(), 1)))


def dot(found: Products, result: torch.Tensor) -> torch.Tensor:
    """``K u sum |x| |w|`` and the rounding of operands and result; no limit where a partial sum may overflow."""
    formats = found.formats
    bound = found.terms * unit_of(formats.accumulate) * found.weight
    bound += ulp_of(result, formats.stored) / 2 if found.beside is None else found.beside
    if not formats.are_plain:  # terms below the smallest number vanish
        bound += found.terms * step_of(formats.accumulate)
    return torch.where(found.weight > limits_of(formats.accumulate).max, math.inf, bound)


def softmax(call: Call, result: torch.Tensor, dtype: AnyFormat) -> torch.Tensor:
    """Bound ``exp(x - max x)``, a sum of ``K`` of them, and a quotient or a logarithm.

    Relative for a softmax: ``8 + K + |x - max x|`` units and as many again for the sum. Absolute for a logarithm:
    ``K + 8`` units and 8 ulp of the largest element of the row, from which the logarithm is subtracted.
    """
    x, u = _finite(call.first), unit_of(dtype)
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


def interpolation(call: Call, result: torch.Tensor, dtype: AnyFormat) -> torch.Tensor:
    """``K u max |x|`` over the image, and what coordinates that are 4 ulp off move the result by."""
    x = _finite(call.first)
    if x.numel() == 0 or result.numel() == 0:
        return torch.zeros_like(result)
    sides = tuple(range(2, x.ndim))
    top, spread = x.abs().amax(sides, keepdim=True), x.amax(sides, keepdim=True) - x.amin(sides, keepdim=True)
    taps = TAPS * max(1.0, x.numel() / result.numel())
    moved = 2 * COORDINATE_ULPS * max(*x.shape[2:], *result.shape[2:]) * spread
    return (unit_of(dtype) * (taps * 2 * top + moved)).expand_as(result) + ulp_of(result, dtype)


def variance(call: Call, results: list[torch.Tensor], dtype: AnyFormat) -> list[torch.Tensor]:
    """Bounds of ``var``, ``std``, ``var_mean`` and ``std_mean``: ``2 K u mean(x^2)``, also where done in one pass.

    The mean squared enters as both are subtracted; a deviation is bounded by the roots of the ends of that interval.
    The mean itself has no limit beside an infinity, of which eager makes NaN as it subtracts it.
    """
    x, u = call.first, unit_of(dtype)
    first = _finite(results[0].abs())
    terms = x.numel() / max(first.numel(), 1)
    square = _finite(x).square()
    dims = sides_of(call)
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


def sides_of(call: Call) -> tuple[int, ...]:
    """Return the sides that a variance goes over, as its operator or ATen's overloads name them."""
    dim = next((v for v in (call.attrs.get("dim"), *call.operands[1:2]) if v is not None), None)
    return tuple(range(call.first.ndim)) if dim is None or dim in ((), []) else dim


def _finite(x: torch.Tensor) -> torch.Tensor:
    return x.nan_to_num(0.0, 0.0, 0.0)
