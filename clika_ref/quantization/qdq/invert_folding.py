"""Inversion of the changes that passes made to a parameter: batch norm folding, factors, and orders of dims."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from clika_ref.core.deferred_constants import DeferredConstant
from clika_ref.core.ir import Value
from clika_ref.core.operators import Operator
from clika_ref.core.traits import SHARED_QPARAMS
from clika_ref.quantization.qdq.channel_scales import scale_along_dim, scale_input_channels
from clika_ref.quantization.qdq.layer_weights import data_of
from clika_ref.quantization.qdq.norm_folding import fold_weight, norm_scale
from clika_ref.quantization.qdq.stored_weights import LayoutStep, MultiplyStep


def find_inverse_steps(constant: Value) -> tuple[Value, list[MultiplyStep | LayoutStep]] | None:
    """Return the only parameter that a constant is computed from, and the steps that restore it.

    None if it is computed from several, a change cannot be inverted, or a factor is 0.
    """
    steps: list[MultiplyStep | LayoutStep] = []
    while constant.deferred_data is not None:
        found = (
            _invert_formula(constant, constant.deferred_data)
            if isinstance(constant.deferred_data, DeferredConstant)
            else None
        )
        if found is None:
            return None
        constant, step = found
        steps += [] if step is None else [step]
    return constant, steps


def _invert_formula(
    constant: Value, formula: DeferredConstant
) -> tuple[Value, MultiplyStep | LayoutStep | None] | None:
    """Return the source of a constant and the step that restores it; the step is None if the elements are the same."""
    source = formula.sources[0]
    if not isinstance(source, Value):
        return None
    arguments = dict(formula.arguments)
    if formula.function is fold_weight:
        gamma, var = (v and v.data for v in formula.sources[1:])
        factor = norm_scale(gamma, var, eps=arguments["eps"])
        return _invert_factor(source, _norm_factor_view(constant, factor, arguments["groups"]))
    if formula.function is scale_along_dim:
        sides, factor = _static_shape(constant), formula.sources[1].data
        along = [-1 if axis == arguments["axis"] else 1 for axis in range(len(sides))]
        return _invert_factor(source, (sides, factor.reshape(along)))
    if formula.function is scale_input_channels:
        return _invert_factor(source, _input_factor_view(constant, formula.sources[1].data, arguments["groups"]))
    if _is_mask_of_zeros(formula, source):
        return source, None
    step = _invert_movement(source, constant, formula)
    return None if step is None else (source, step)


def _norm_factor_view(constant: Value, factor: Tensor, groups: int | None) -> tuple[tuple[int, ...], Tensor]:
    """Return the shape with the channels of a weight along one dim, and the factor along it."""
    sides = _static_shape(constant)
    if groups is None:
        return sides, factor.reshape(-1, *[1] * (len(sides) - 1))
    seen = (groups, sides[0] // groups, *sides[1:])  # channel g * (k / groups) + j is [g, :, j]
    return seen, factor.reshape(groups, 1, -1, *[1] * (len(sides) - 2))


def _input_factor_view(constant: Value, factor: Tensor, groups: int) -> tuple[tuple[int, ...], Tensor]:
    """Return the shape with the input channels of a weight along two dims, and the factor along them."""
    sides = _static_shape(constant)
    return (groups, sides[0] // groups, *sides[1:]), factor.reshape(groups, 1, -1, *[1] * (len(sides) - 2))


def _invert_factor(source: Value, seen: tuple[tuple[int, ...], Tensor]) -> tuple[Value, MultiplyStep] | None:
    """Return the step that divides by a factor; None if the factor has no inverse."""
    sides, factor = seen
    inverse = (1 / factor.detach().double()).float()
    return (source, MultiplyStep(sides, inverse)) if bool((inverse.isfinite() & (inverse != 0)).all()) else None


def _is_mask_of_zeros(formula: DeferredConstant, source: Value) -> bool:
    """Return whether a formula only applies a mask to elements that are 0 already."""
    if not isinstance(formula.function, Operator) or formula.function.name != "mul" or len(formula.sources) != 2:
        return False
    mask: Any = formula.sources[1]
    if not isinstance(mask, Value) or mask.type.dtype != torch.bool or mask.type.shape != source.type.shape:
        return False
    return not bool(data_of(source)[~data_of(mask)].any())


def _invert_movement(source: Value, constant: Value, formula: DeferredConstant) -> LayoutStep | None:
    """Return the inverse of a formula that only moves elements, found by applying it to element indices."""
    function = formula.function
    if isinstance(function, Operator) and function.trait is not SHARED_QPARAMS:
        return None
    others = formula.sources[1:]
    if any(isinstance(v, Value) for v in others) or source.data is None or source.data.numel() >= 2**31:
        return None
    device = source.data.device
    places = torch.arange(source.data.numel(), dtype=torch.int32, device=device).reshape(source.data.shape)
    try:
        found = function(places, *others, **dict(formula.arguments))
    except (RuntimeError, TypeError):  # it takes no integers, so it does not merely move its input
        return None
    found = found if isinstance(found, Tensor) else found[formula.index]
    sides = _static_shape(constant)
    if tuple(found.shape) != sides or not torch.equal(found.flatten().sort().values, places.flatten()):
        return None
    strides = [int(found.select(axis, 1).flatten()[0]) if side > 1 else 0 for axis, side in enumerate(sides)]
    expected = torch.zeros_like(found)
    for axis, (side, stride) in enumerate(zip(sides, strides, strict=True)):
        along = torch.arange(side, dtype=torch.int32, device=device) * stride
        expected += along.reshape([-1 if a == axis else 1 for a in range(len(sides))])
    return LayoutStep(tuple(source.data.shape), tuple(strides)) if torch.equal(found, expected) else None


def _static_shape(constant: Value) -> tuple[int, ...]:
    return tuple(map(int, constant.type.shape))
