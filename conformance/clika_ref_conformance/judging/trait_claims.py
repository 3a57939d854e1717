"""Check an operator's quantization trait against eager, as placement relies on it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from clika_ref.core.operators import Operator
from clika_ref.core.traits import LOOKUP, SHARED_QPARAMS, UNIFIED_QPARAMS, QuantizationTrait
from clika_ref_conformance.eager_calls import call_eagerly


def has_claims(op: Operator) -> bool:
    """Return whether the trait of an operator claims anything about its elements."""
    trait = op.trait
    return (
        trait in (SHARED_QPARAMS, UNIFIED_QPARAMS)
        or trait.weight is not None
        or bool(trait.factors)
        or trait.is_homogeneous
    )


def claim_of(trait: QuantizationTrait) -> str:
    """Return a trait as it is declared."""
    if trait.factors:
        return f"scaled_by({', '.join(map(str, trait.factors))})"
    return "HOMOGENEOUS" if trait.is_homogeneous else trait.kind


def find_broken_claim(op: Operator, operands: Sequence[Any], attrs: Mapping[str, Any]) -> str | None:
    """Describe the first claim that fails for a call that eager accepts; None if all hold or nothing is claimed.

    Operators that move elements return only zeros and elements of the operand with the claimed scale. Operators with a
    weight are linear in it, per output channel, and add the bias unchanged. Operators that pass factors on, or are
    scaled by vectors, return twice the result for twice the operand.
    """
    named = (op.trait.weight, op.trait.bias, *op.trait.factors)
    lacking = [position for position in named if position is not None and position >= len(operands)]
    if lacking:
        return f"it has no operand {lacking[0]}: it has {len(operands)}, counted from 0"
    tensors = [o for o in operands if isinstance(o, torch.Tensor)]
    if op.trait in (SHARED_QPARAMS, LOOKUP):
        return _find_foreign_element(call_eagerly(op, operands, attrs), tensors[:1], "its first operand")
    if op.trait is UNIFIED_QPARAMS:
        return _find_foreign_element(call_eagerly(op, operands, attrs), tensors, "its operands")
    if op.trait.weight is not None:
        return _check_weight_claim(op, operands, attrs)
    if op.trait.is_homogeneous:
        return _check_doubling(op, operands, attrs, (0,))
    return _check_doubling(op, operands, attrs, op.trait.factors) if op.trait.factors else None


def _find_foreign_element(results: Iterable[torch.Tensor], sources: Sequence[torch.Tensor], owner: str) -> str | None:
    for result in results:
        known = [s.to(result.dtype).flatten() for s in sources]
        if not known or not result.is_floating_point():
            continue
        new = result[~torch.isin(result, torch.cat([*known, result.new_zeros(1)])) & ~result.isnan()]
        if len(new):
            return f"it returns {new[0].item():g}, which is not an element of {owner} and may exceed its scale"
    return None


def _check_weight_claim(op: Operator, operands: Sequence[Any], attrs: Mapping[str, Any]) -> str | None:
    trait = op.trait
    weight = operands[trait.weight or 0]
    if not isinstance(weight, torch.Tensor) or not weight.is_floating_point() or weight.ndim < 2 or not weight.numel():
        return None  # vectors have no output channels
    bias = None if trait.bias is None else operands[trait.bias]
    plain = _replace_operands(operands, {trait.bias: None} if trait.bias is not None else {})
    (whole,) = call_eagerly(op, plain, attrs)
    doubled = weight.clone()
    doubled.select(trait.axis or 0, 0).mul_(2)  # its first output channel; twice a number is not rounded
    (more,) = call_eagerly(op, _replace_operands(plain, {trait.weight: doubled}), attrs)
    if not bool(((more == whole) | (more == 2 * whole) | _may_round_differently(whole)).all()):
        return f"axis {trait.axis} of its weight is not that of output channels: twice a slice is not twice the result"
    channels = (more != whole).movedim(trait.channel or 0, 0)
    if weight.shape[trait.axis or 0] > 1 and len(channels) and all(bool(c.any()) for c in channels):
        return f"dim {trait.channel} of its result is not that of output channels: one of the weight changes all"
    if isinstance(bias, torch.Tensor):
        (alone,) = call_eagerly(op, _replace_operands(operands, {trait.weight: torch.zeros_like(weight)}), attrs)
        return _find_foreign_element([alone], [bias], "the bias, although the weight is 0")
    return None


def _check_doubling(
    op: Operator, operands: Sequence[Any], attrs: Mapping[str, Any], positions: Sequence[int]
) -> str | None:
    """Describe a failure if doubling elements of the operands' last dim does not double those of the result."""
    first = operands[positions[0]]
    if not isinstance(first, torch.Tensor) or not first.is_floating_point() or not first.ndim or not first.numel():
        return None  # without such an operand, nothing is scaled
    larger: dict[int | None, Any] = {i: o.clone() for i in positions if isinstance(o := operands[i], torch.Tensor)}
    for operand in larger.values():
        operand[..., 0].mul_(2)
    whole, more = (call_eagerly(op, given, attrs)[0] for given in (operands, _replace_operands(operands, larger)))
    if not whole.ndim or whole.shape[-1] != first.shape[-1]:
        return f"the last dim of the first operand, {[*first.shape]}, is not that of its result, {[*whole.shape]}"
    wanted = whole.clone()
    wanted[..., 0].mul_(2)
    exact = (more == wanted) | _may_round_differently(whole) | ~wanted.isfinite()
    if not bool(exact.all()):
        return "doubling the first elements of the last dim does not double those of the result, and no others"
    return None


def _may_round_differently(result: torch.Tensor) -> torch.Tensor:
    """Return a mask of elements that may not double exactly: infinite, or below the normal range of their dtype."""
    tiny = torch.finfo(result.dtype).tiny if result.is_floating_point() else 0
    return ~result.isfinite() | (result.abs() < tiny)


def _replace_operands(operands: Sequence[Any], changed: Mapping[int | None, Any]) -> list[Any]:
    return [changed.get(i, o) for i, o in enumerate(operands)]
