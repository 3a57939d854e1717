"""Rewrite a product of a tensor and its sigmoid as ``silu``."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

import torch

from clika_ref.core.accuracy import COMPOSE
from clika_ref.core.inference import Builder
from clika_ref.core.ir import Node, Value
from clika_ref.core.passes import Phase
from clika_ref.core.rewriter import Skip, rule
from clika_ref.core.types import TensorType
from clika_ref_cleanup.cleanup_pass import RulePass, keep_name


@rule("mul")
def mul_to_silu(node: Node, build: Builder):
    """``x * sigmoid(x)`` is ``silu(x)``."""
    for x, gate in (node.inputs, node.inputs[::-1]):
        producer = gate.producer if isinstance(gate, Value) else None
        if producer is not None and producer.op_type == "sigmoid" and producer.inputs == (x,):
            if len(gate.uses) > 1:
                return Skip("its sigmoid has another reader", 1)
            if x.type != node.output.type:
                return Skip("it multiplies integers", 2)
            return keep_name(build.graph, node.output, build("silu", x, types=(node.output.type,)))
    return Skip("it is no product of a tensor and its sigmoid")


def product_with_sigmoid(build: Builder) -> Value:
    """A tensor times its sigmoid."""
    x = build.graph.add_input(TensorType(torch.float32, (3, 5)), "x")
    return build("mul", x, build("sigmoid", x))


class MulToSilu(RulePass):
    """Rewrite ``x * sigmoid(x)`` as ``silu``, so that both forms are placed alike: in float between INT8 layers."""

    name = "mul-to-silu"
    rules = (mul_to_silu,)
    motifs: ClassVar[tuple[Callable[[Builder], Value], ...]] = (product_with_sigmoid,)
    phase = Phase.FUSE
    after = ("merge-common-subexpressions",)
    error = COMPOSE
    removes = "sigmoid node"
