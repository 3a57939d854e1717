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
from clika_ref.quantization.qdq.layer_weights import data_of, reshape_along_dim
from clika_ref.quantization.qdq.norm_folding import fold_weight, norm_scale
from clika_ref.quantization.qdq.stored_weights import LayoutStep, MultiplyStep


def find_inverse_steps(constant: Value) -> tuple[Value, list[MultiplyStep | LayoutStep]] | None:
    """Return the only parameter that a constant is computed from, and the steps that restore it.

    None if it is computed from several, a change cannot be inverted, or a factor is 0.
    """
    steps: list[MultiplyStep | LayoutStep] = []
    while constant.deferred_data is not None:
        found = _invert_deferred(constant)
        if found is None:
            return None
        constant, step = found
        steps += [] if step is None else [step]
    return constant, steps


def _invert_deferred(constant: Value) -> tuple[Value, MultiplyStep | LayoutStep | None] | None:
    """Return the source of a constant and the step that restores it; the step is None if the elements are the same."""
    deferred = constant.deferred_data
    if not isinstance(deferred, DeferredConstant) or not isinstance(deferred.sources[0], Value):
        return None
    source = deferred.sources[0]
    arguments = dict(deferred.arguments)
    if deferred.function is fold_weight:
        gamma, var = (v and v.data for v in deferred.sources[1:])
        factor = norm_scale(gamma, var, eps=arguments["eps"])
        return _invert_factor(source, _factor_view(constant, factor, arguments["groups"]))
    if deferred.function is scale_along_dim:
        shape, factor = _static_shape(constant), deferred.sources[1].data
        return _invert_factor(source, (shape, reshape_along_dim(factor, arguments["axis"], len(shape))))
    if deferred.function is scale_input_channels:
        return _invert_factor(source, _factor_view(constant, deferred.sources[1].data, arguments["groups"]))
    if _is_mask_of_zeros(deferred, source):
        return source, None
    step = _invert_movement(source, constant, deferred)
    return None if step is None else (source, step)


def _factor_view(constant: Value, factor: Tensor, groups: int | None) -> tuple[tuple[int, ...], Tensor]:
    """Return the shape with the scaled channels of a weight along dim 0, or dims 0 and 2, and the factor along them."""
    shape = _static_shape(constant)
    if groups is None:
        return shape, reshape_along_dim(factor, 0, len(shape))
    seen = (groups, shape[0] // groups, *shape[1:])  # channel g * (k / groups) + j is [g, :, j]
    return seen, factor.reshape(groups, 1, -1, *[1] * (len(shape) - 2))


def _invert_factor(source: Value, seen: tuple[tuple[int, ...], Tensor]) -> tuple[Value, MultiplyStep] | None:
    """Return the step that divides by a factor; None if the factor has no inverse."""
    shape, factor = seen
    inverse = (1 / factor.detach().double()).float()
    return (source, MultiplyStep(shape, inverse)) if bool((inverse.isfinite() & (inverse != 0)).all()) else None


def _is_mask_of_zeros(deferred: DeferredConstant, source: Value) -> bool:
    """Return whether a formula only applies a mask to elements that are 0 already."""
    if not isinstance(deferred.function, Operator) or deferred.function.name != "mul" or len(deferred.sources) != 2:
        return False
    mask: Any = deferred.sources[1]
    if not isinstance(mask, Value) or mask.type.dtype != torch.bool or mask.type.shape != source.type.shape:
        return False
    return not bool(data_of(source)[~data_of(mask)].any())


def _invert_movement(source: Value, constant: Value, deferred: DeferredConstant) -> LayoutStep | None:
    """Return the inverse of a formula that only moves elements, found by applying it to element indices."""
    function = deferred.function
    if isinstance(function, Operator) and function.trait is not SHARED_QPARAMS:
        return None
    others = deferred.sources[1:]
    if any(isinstance(v, Value) for v in others) or source.data is None or source.data.numel() >= 2**31:
        return None
    device = source.data.device
    positions = torch.arange(source.data.numel(), dtype=torch.int32, device=device).reshape(source.data.shape)
    try:
        found = function(positions, *others, **dict(deferred.arguments))
    except (RuntimeError, TypeError):  # it takes no integers, so it does not merely move its input
        return None
    found = found if isinstance(found, Tensor) else found[deferred.index]
    shape = _static_shape(constant)
    if tuple(found.shape) != shape or not torch.equal(found.flatten().sort().values, positions.flatten()):
        return None
    strides = [int(found.select(axis, 1).flatten()[0]) if size > 1 else 0 for axis, size in enumerate(shape)]
    expected = torch.zeros_like(found)
    for axis, (size, stride) in enumerate(zip(shape, strides, strict=True)):
        along = torch.arange(size, dtype=torch.int32, device=device) * stride
        expected += reshape_along_dim(along, axis, len(shape))
    return LayoutStep(tuple(source.data.shape), tuple(strides)) if torch.equal(found, expected) else None


def _static_shape(constant: Value) -> tuple[int, ...]:
    return tuple(map(int, constant.type.shape))
