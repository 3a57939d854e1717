"""Fold batch norm into the convolution or linear layer before it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from clika_ref.core.accuracy import DOT
from clika_ref.core.deferred_constants import DeferredConstant
from clika_ref.core.inference import Builder
from clika_ref.core.ir import Graph, Node, Value
from clika_ref.core.passes import Phase
from clika_ref.core.rewriter import Skip, rule
from clika_ref.core.types import TensorType
from clika_ref.quantization.qdq.norm_folding import fold_bias, fold_weight, norm_scale
from clika_ref_cleanup.cleanup_pass import RulePass

FOLDABLE_RANKS = {
    "linear": 2,
    **{f"conv{dims}d": dims + 2 for dims in (1, 2, 3)},
    **{f"conv_transpose{dims}d": dims + 2 for dims in (1, 2, 3)},
}
"""Operators that batch norm folds into, with the output rank that puts the weight's channels in dim 1."""


@rule("batch_norm")
def fold_batch_norm(node: Node, build: Builder):
    """``(conv(x, w) + b - mean) * s + beta`` is ``conv(x, w * s) + (b - mean) * s + beta``.

    With ``s = gamma / sqrt(var + eps)``; computed in float64 and rounded once.
    """
    _, *statistics = _pad_operands(node.inputs, 5)  # x, weight, bias, mean, variance
    if node.attrs["training"] or None in statistics[2:]:
        return Skip("normalizes by the statistics of its own input")
    match node.inputs[0]:
        case Value(producer=Node() as layer) as middle if layer.op_type in FOLDABLE_RANKS:
            pass
        case _:
            return Skip(
                "its operand is no convolution or linear layer; padding prevents folding into a following one", 1
            )
    x, weight, bias = _pad_operands(layer.inputs, 3)
    if not middle.type.rank == weight.type.rank == FOLDABLE_RANKS[layer.op_type]:
        return Skip(f"dim 1 of the result of {layer.op_type} is not the channel dim", 2)
    if len(middle.uses) != 1:
        return Skip(f"%{middle.name} has other readers", 3)
    facts = (weight, bias, *statistics)
    if not all(v is None or _is_fixed(v, build.graph) for v in facts):
        return Skip("a weight or a statistic is computed, or overwritten by a call", 4)
    if not weight.type.dtype.is_floating_point or middle.type.dtype != node.output.type.dtype:
        return Skip("changes the dtype", 5)
    dtype, eps = weight.type.dtype, node.attrs["eps"]
    gamma, beta, mean, var = statistics
    scale, shift = _scale_and_shift(bias, statistics, eps)
    if not _is_finite_after_folding(weight, scale, shift):
        return Skip("the folded weight overflows", 6)
    build.origin = layer.origin.with_rule("fold_batch_norm")  # the user knows it by the name of the layer
    base = weight.name.removesuffix("weight").rstrip(".") or node.name
    groups = layer.attrs["groups"] if layer.op_type.startswith("conv_transpose") else None
    made = DeferredConstant(fold_weight, (weight, gamma, var), (("eps", eps), ("groups", groups)))
    scaled = build.constant(made, weight.name, weight.type)
    shifted_bias = DeferredConstant(
        fold_bias, (bias, gamma, beta, mean, var), (("eps", eps), ("dtype", dtype)), known=shift.to(dtype)
    )
    shifted = build.constant(shifted_bias, bias.name if bias else f"{base}.bias", TensorType(dtype, shift.shape))
    folded = build(layer.op, x, scaled, shifted, types=(node.output.type,), **layer.attrs)
    folded.name, middle.name = middle.name, folded.name
    return folded


def _pad_operands(operands: tuple[Any, ...], count: int) -> tuple[Any, ...]:
    """Return the operands with None for trailing ones that the call omits."""
    return (*operands, *[None] * (count - len(operands)))


def _is_fixed(value: Any, graph: Graph) -> bool:
    return isinstance(value, Value) and value.is_constant and not graph.is_overwritten(value.name)


def _scale_and_shift(bias: Value | None, statistics: Sequence[Any], eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the scale and the shift of each channel, in float64."""
    gamma, beta, mean, var = (v and v.data for v in statistics)
    with torch.no_grad():
        scale = norm_scale(gamma, var, eps=eps)
        return scale, fold_bias(bias and bias.data, gamma, beta, mean, var, eps=eps, dtype=torch.float64)


def _is_finite_after_folding(weight: Value, scale: torch.Tensor, shift: torch.Tensor) -> bool:
    """Whether the folded weight cannot overflow. NaN and infinity show up in the minimum or maximum."""
    assert weight.data is not None
    if not weight.data.numel():
        return True
    largest = max(abs(float(bound)) for bound in torch.aminmax(weight.data.detach()))
    worst = torch.stack([scale.abs().max() * largest, shift.abs().max()]).to(weight.type.dtype)
    return bool(worst.isfinite().all())


class FoldBatchNorm(RulePass):
    """Fold batch norm in eval mode into the preceding layer, if it is that layer's only user.

    Shared weights get a separate folded copy.
    """

    name = "fold-batch-norm"
    rules = (fold_batch_norm,)
    phase = Phase.FUSE
    after = ("remove-identities", "remove-detach")
    error = DOT
    removes = "BatchNorm layer"
