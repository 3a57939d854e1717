"""Batch norms that were folded into layers: their tensors, and the multipliers of their channels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from clika_ref.core.ir import Node, Value
from clika_ref.formulas import Formula
from clika_ref.norm_folding import folded_bias, folded_weight, norm_scale
from clika_ref.quantization.factors import scaled_along, times
from clika_ref.quantization.fake_quantization import followed_scales
from clika_ref.quantization.layer_weights import bias_of, position_of


@dataclass(frozen=True)
class FoldedNorm:
    """A batch norm that was folded into a layer."""

    bias: Value | None
    """Bias of the layer before folding."""
    gamma: Value | None
    beta: Value | None
    mean: Value
    var: Value
    eps: float
    factor: Value | None
    """Later multiplier of the output channels."""

    @property
    def scale(self) -> Formula:
        """Multiplier of the norm, ``float64[channels]``."""
        return Formula(norm_scale, (self.gamma, self.var), (("eps", self.eps),))


def folded_norm(node: Node) -> FoldedNorm | None:
    """Return the batch norm that was folded into a layer, None if there is none."""
    if node.op.trait.weight is None or node.op.trait.bias is None:
        return None
    of_weight, _ = _made(node.inputs[position_of(node)])
    of_bias, factor = _made(bias_of(node))
    if of_weight is None or of_bias is None:
        return None
    if of_weight.function is not folded_weight or of_bias.function is not folded_bias:
        return None
    return FoldedNorm(*of_bias.sources, eps=dict(of_bias.arguments)["eps"], factor=factor)


def _made(constant: Any) -> tuple[Formula | None, Value | None]:
    """Return the folding formula of a constant, and the factor that was applied to its result, if any."""
    factor: Value | None = None
    formula = constant.formula if isinstance(constant, Value) else None
    while isinstance(formula, Formula) and formula.function in (scaled_along, times):
        if formula.function is scaled_along:
            factor = formula.sources[1]
        formula = formula.sources[0].formula
    return (formula if isinstance(formula, Formula) else None), factor


def scales_now(scales: Tensor, node: Node, then: Tensor | None) -> Tensor:
    """Return the weight scales of a layer for the current multiplier of its folded norm.

    Args:
        scales: as they were chosen, ``float32[channels, ...]``.
        node: the layer.
        then: multiplier of the norm when the scales were chosen, ``float64[channels]``; None if scales do not follow
            it.
    """
    norm = None if then is None else folded_norm(node)
    return scales if then is None or norm is None else followed_scales(scales, norm.scale(), then)
