"""Batch norms that were folded into layers: their tensors, and the multipliers of their channels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from clika_ref.core.deferred_constants import DeferredConstant
from clika_ref.core.ir import Node, Value
from clika_ref.quantization.qat.fake_quantization import follow_norm_multiplier
from clika_ref.quantization.qdq.channel_scales import scale_along_dim, scale_input_channels
from clika_ref.quantization.qdq.layer_weights import bias_of, weight_position_of
from clika_ref.quantization.qdq.norm_folding import fold_bias, fold_weight, norm_scale


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
    def scale(self) -> DeferredConstant:
        """Multiplier of the norm, ``float64[channels]``."""
        return DeferredConstant(norm_scale, (self.gamma, self.var), (("eps", self.eps),))


def find_folded_norm(node: Node) -> FoldedNorm | None:
    """Return the batch norm that was folded into a layer, None if there is none."""
    if node.op.trait.weight is None or node.op.trait.bias is None:
        return None
    of_weight, _ = _find_folding(node.inputs[weight_position_of(node)])
    of_bias, factor = _find_folding(bias_of(node))
    if of_weight is None or of_bias is None:
        return None
    if of_weight.function is not fold_weight or of_bias.function is not fold_bias:
        return None
    return FoldedNorm(*of_bias.sources, eps=dict(of_bias.arguments)["eps"], factor=factor)


def _find_folding(constant: Any) -> tuple[DeferredConstant | None, Value | None]:
    """Return the deferred constant of a folded norm, and the factor that was applied to its result, if any."""
    factor: Value | None = None
    deferred = constant.deferred_data if isinstance(constant, Value) else None
    while isinstance(deferred, DeferredConstant) and deferred.function in (scale_along_dim, scale_input_channels):
        if deferred.function is scale_along_dim:
            factor = deferred.sources[1]
        deferred = deferred.sources[0].deferred_data
    return (deferred if isinstance(deferred, DeferredConstant) else None), factor


def current_weight_scales(scales: Tensor, node: Node, then: Tensor | None) -> Tensor:
    """Return the weight scales of a layer for the current multiplier of its folded norm.

    Args:
        scales: as they were chosen, ``float32[channels, ...]``.
        node: the layer.
        then: multiplier of the norm when the scales were chosen, ``float64[channels]``; None if scales do not follow
            it.
    """
    norm = None if then is None else find_folded_norm(node)
    return scales if then is None or norm is None else follow_norm_multiplier(scales, norm.scale(), then)
