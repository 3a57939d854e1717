"""Recurrent layers with 8-bit weights, a scale for each row; inputs are rounded at run time, or stay in float."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch
from torch import Tensor

from clika_ref.core.inference import Builder
from clika_ref.core.ir import Graph, Node, Value
from clika_ref.core.operators import Operator
from clika_ref.core.quantization_scheme import QuantizationScheme
from clika_ref.core.types import TensorType
from clika_ref.quantization.qdq.layer_weights import data_of
from clika_ref.quantization.qdq.packed_weights import PackedWeight

DYNAMIC_PREFIX = "dynamic_"
"""The form of ``lstm`` that rounds inputs at run time is the operator ``dynamic_lstm``."""


def list_dynamic_layers(scheme: QuantizationScheme) -> dict[str, int]:
    """Return the operators that a target computes with inputs rounded at run time: see `QuantizationScheme.dynamic`."""
    return {name: least for name, least in scheme.dynamic.items() if least is not None}


def find_input_block(scheme: QuantizationScheme) -> int:
    """Return the number of elements that share a scale when the runtime rounds inputs of layers with low-bit weights.

    Returns:
        0 if it does not, or if operators do so: see `list_dynamic_layers`.
    """
    only = scheme.weights_only
    return only.block_size if only is not None and only.rounds_inputs and not list_dynamic_layers(scheme) else 0


def quantize_recurrent_layer(
    graph: Graph,
    node: Node,
    matrices: Mapping[str, PackedWeight],
    operators: Mapping[str, Operator],
    *,
    is_dynamic: bool,
) -> None:
    """Quantize the matrices of a recurrent layer.

    Args:
        graph: that of the layer.
        node: the layer.
        matrices: the low-bit form of each matrix, by its name.
        operators: those of the registry.
        is_dynamic: whether the layer becomes its dynamic form, or reads dequantized weights.
    """
    build = Builder(graph, operators, node, node.origin)
    operands: list[object] = []
    for operand in node.inputs:
        packed = matrices.get(operand.name) if isinstance(operand, Value) and operand.is_constant else None
        if packed is None:
            operands.append(operand)
            continue
        made = partial(_quantize_rows, operand, packed)
        integers = build.constant(made, f"{operand.name}_integers", TensorType(torch.int8, operand.type.shape))
        scales = build.constant(packed.scales[:, 0].contiguous(), f"{operand.name}_scale")
        operands += [integers, scales] if is_dynamic else [build("dequantize", integers, scales, axis=0)]
    if not is_dynamic:
        for position, operand in enumerate(operands):
            graph.set_input(node, position, operand)
        return
    dynamic = Node(operators[DYNAMIC_PREFIX + node.op_type], operands, node.attrs, node.origin)
    graph.insert(dynamic, [v.type for v in node.outputs], node, [v.name for v in node.outputs])
    for old, new in zip(node.outputs, dynamic.outputs, strict=True):
        graph.replace(old, new)
        new.name, old.name = old.name, new.name
    graph.erase(node)


def _quantize_rows(matrix: Value, packed: PackedWeight) -> Tensor:
    return packed.steps(data_of(matrix).float())
