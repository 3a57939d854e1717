"""Graphs that only run to evaluate a plan: each ``quantize``/``dequantize`` pair of an activation is one operator."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from clika_ref.core.inference import Builder
from clika_ref.core.ir import Graph
from clika_ref.core.operators import Operator, operator
from clika_ref.quantization.qdq.insertion import Plan, quantize_graph, quantize_weight


@operator()
def quantize_dequantize(x: Tensor, scale: float, zero_point: int, *, low: int, high: int) -> Tensor:
    """Return ``x``, float32, quantized to ``low`` to ``high`` and dequantized.

    The result equals that of the pair. It takes a quarter of the time, since no integers are stored.
    """
    return (x / scale).round_().clamp_(low - zero_point, high - zero_point).mul_(scale)


def clone_quantized(graph: Graph, plan: Plan, operators: Mapping[str, Operator]) -> Graph:
    """Return a clone of a float graph, quantized with a plan, to run and not to export."""
    twin, kind = graph.clone(), plan.scheme.activations
    quantize_graph(twin, plan, operators)
    for node in list(twin.nodes):
        made = node.first_tensor.producer if node.op_type == "dequantize" else None
        if made is None or made.op_type != "quantize" or made.first_tensor.type.dtype != torch.float32:
            continue
        build = Builder(twin, operators, node, node.origin)
        fused = build(quantize_dequantize, *made.inputs, types=[node.output.type], low=kind.low, high=kind.high)
        twin.replace(node.output, fused)
        twin.erase(node)
        if not made.output.use_count:
            twin.erase(made)
    return twin


KnownWeights = MutableMapping[str, tuple[tuple[Any, ...], Tensor]]
"""The quantized weight of each layer by the name of its constant, with the arguments that it was computed from."""


def share_quantized_weights(graph: Graph, known: KnownWeights) -> None:
    """Give a graph the quantized weights of an earlier one where they are equal, and remember the others.

    A graph that only runs computes its quantized weights on each run, and plans that differ in the scales of
    activations have the same ones. The elements take a quarter of the memory of the weights.
    """
    for value in graph.constants.values():
        made = value.deferred_data
        if not isinstance(made, partial) or made.func is not quantize_weight:
            continue
        weight, *others = made.args
        arguments = weight.name, *others
        if value.name not in known or not _are_equal(known[value.name][0], arguments):
            known[value.name] = arguments, made()
        value.data = known[value.name][1]


def _are_equal(first: tuple[Any, ...], second: tuple[Any, ...]) -> bool:
    pairs = zip(first, second, strict=True)
    return all(
        torch.equal(a, b) if isinstance(a, Tensor) and isinstance(b, Tensor) else a is b or a == b for a, b in pairs
    )
