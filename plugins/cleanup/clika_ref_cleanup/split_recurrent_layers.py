"""Split an LSTM of several layers into one node for each, so that each is quantized or not."""

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

STATES = 2
"""Number of states of an LSTM: the hidden state and the cell."""


@rule("lstm")
def split_recurrent_layers(node: Node, build: Builder):
    """Each layer reads the output of the one before, and its own part of the initial states."""
    layers = node.attrs["num_layers"]
    if layers == 1:
        return Skip("it has a single layer")
    x, *operands = node.inputs
    states, params = operands[:STATES], operands[STATES:]
    directions, count = 2 if node.attrs["bidirectional"] else 1, len(params) // layers
    finals: list[tuple[Value, ...]] = []
    for layer in range(layers):
        first = layer * directions
        own = [build("slice", state, dim=0, start=first, end=first + directions) for state in states]
        read = params[layer * count : (layer + 1) * count]
        x, *last = build("lstm", x, *own, *read, **{**node.attrs, "num_layers": 1})
        finals.append(tuple(last))
    joined = [build("cat", *parts, dim=0) for parts in zip(*finals, strict=True)]
    return tuple(keep_name(build.graph, old, new) for old, new in zip(node.outputs, (x, *joined), strict=True))


def layers_of_both_directions(build: Builder) -> tuple[Value, ...]:
    """Two layers, each of both directions."""
    sizes = ((12, 4), (12, 3), (12,), (12,)), ((12, 6), (12, 3), (12,), (12,))
    x, *states = (
        build.graph.add_input(TensorType(torch.float32, shape), "x") for shape in ((2, 5, 4), (4, 2, 3), (4, 2, 3))
    )
    params = [
        build.constant(0.1 * torch.randn(shape), "weight") for layer in sizes for _ in range(2) for shape in layer
    ]
    options = {"has_biases": True, "num_layers": 2, "bidirectional": True, "batch_first": True}
    return build("lstm", x, *states, *params, **options)


class SplitRecurrentLayers(RulePass):
    """Split an LSTM of several layers, whose sensitivities to rounding differ."""

    name = "split-recurrent-layers"
    rules = (split_recurrent_layers,)
    motifs: ClassVar[tuple[Callable[[Builder], tuple[Value, ...]], ...]] = (layers_of_both_directions,)
    phase = Phase.FUSE
    after = ("merge-common-subexpressions",)
    error = COMPOSE
    may_grow = True
    removes = "LSTM of several layers"
