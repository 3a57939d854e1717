"""Rewrite ``addmm`` with a constant weight as a linear layer."""

from __future__ import annotations

from clika_ref.core.accuracy import DOT
from clika_ref.core.deferred_constants import DeferredConstant, transpose_weight
from clika_ref.core.inference import Builder
from clika_ref.core.ir import Node
from clika_ref.core.passes import Phase
from clika_ref.core.rewriter import Skip, rule
from clika_ref.core.types import TensorType
from clika_ref_cleanup.cleanup_pass import RulePass, keep_name


@rule("addmm")
def addmm_to_linear(node: Node, build: Builder):
    """``addmm(bias, x, weight)`` is ``linear(x, weight.T, bias)``, a layer with a bias for placement."""
    bias, x, weight = node.inputs
    if (node.attrs["beta"], node.attrs["alpha"]) != (1, 1):
        return Skip("scales its bias or its product")
    if not weight.is_constant or build.graph.is_overwritten(weight.name) or not weight.type.dtype.is_floating_point:
        return Skip("its second factor is computed, overwritten by a call, or an integer tensor", 1)
    if bias.type != TensorType(weight.type.dtype, weight.type.shape[1:]) or node.output.type.dtype != bias.type.dtype:
        return Skip("the added tensor is not a bias with one element for each column", 2)
    rows = build.constant(
        DeferredConstant(transpose_weight, (weight,)),
        weight.name,
        TensorType(weight.type.dtype, weight.type.shape[::-1]),
    )
    return keep_name(build.graph, node.output, build("linear", x, rows, bias, types=(node.output.type,)))


class AddmmToLinear(RulePass):
    """Rewrite ``addmm`` with constants as linear layers, so that a layer has a single form. GPT-2 uses ``addmm``."""

    name = "addmm-to-linear"
    rules = (addmm_to_linear,)
    phase = Phase.FUSE
    after = ("fold-constants",)
    error = DOT
    removes = "addmm node"
