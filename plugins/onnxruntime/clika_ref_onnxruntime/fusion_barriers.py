"""Rewrite nodes that ONNX Runtime would fuse into something slower, or less accurate."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import onnx_ir as ir
import torch
from onnx_ir import tensor_adapters

from clika_ref.onnx_export.emission import OPERATOR_KEY
from clika_ref_onnxruntime.explaining import FUSED_ACTIVATIONS, MOVING_OPERATORS

WEIGHT_QUANTIZED_OPERATORS = frozenset({"Conv", "ConvTranspose", "Gemm"})
"""ONNX operators with float weights that ONNX Runtime quantizes (``weight_bias_quantization.cc``)."""

PASSED_OPERATORS = MOVING_OPERATORS | {"MaxPool"}
"""Operators that ONNX Runtime may move quantize and dequantize nodes across (``propagate_qdq_ops.cc``)."""


def prevent_fusion(model: ir.Model, float_islands: Collection[str] = ()) -> None:
    """Replace some nodes by equivalent ones that are not fused (ONNX Runtime 1.31).

    An addition becomes ``Sum``:

    - Before a layer norm it would become SkipLayerNormalization, which adds row by row: 53 µs for 26 tokens of 384
      channels, compared with 4 µs for an addition and 9 µs for a norm.
    - A float bias after a quantized matrix product would become a Gemm if its dims are fixed later, and that Gemm
      computes in float.

    A ``Relu`` or ``Clip`` becomes ``Max`` and ``Min``. Otherwise, after a matrix product with a quantized weight and
    float output, it would be fused into a Gemm, or ONNX Runtime would look for a quantized output after it. The product
    then computes in float, and the weight is dequantized at each call: 1.2 ms instead of 0.1 ms for 4 rows and a
    weight of 768 by 768.

    A ``Sum`` of one operand separates some float nodes from the quantization of their result:

    - A layer with a float weight and a dequantized input. Otherwise ONNX Runtime quantizes the weight, with one scale
      for all channels, and runs the layer in INT8.
    - ``Softmax`` of a dequantized input. Otherwise it runs as QLinearSoftmax, with a table of rounded exponentials.
    - ``MaxPool`` with indices. Otherwise its input is quantized, and the indices are those of other elements.
    - The lowerings of the operators in ``float_islands`` after a dequantized input, which are faster in float.
    """
    for node in [*model.graph]:
        result = node.outputs[0]
        if (
            node.op_type == "Add"
            and result.dtype == ir.DataType.FLOAT
            and (_is_layer_norm_input(result) or _is_float_bias_add(node))
        ):
            node.op_type = "Sum"
        elif node.op_type in ("Relu", "Clip") and result.dtype == ir.DataType.FLOAT and _is_float_clip(node):
            _replace_by_min_max(model.graph, node)
        elif _runs_in_int8_if_quantized(node) or (
            node.meta.get(OPERATOR_KEY) in float_islands and _is_dequantized(node.inputs[0])
        ):
            _keep_in_float(model.graph, node)


def _runs_in_int8_if_quantized(node: ir.Node) -> bool:
    """Whether the runtime would run a float node in INT8 with other results, if its result is quantized."""
    if node.op_type == "MaxPool":
        return len(node.outputs) > 1 and bool(node.outputs[1].uses() or node.outputs[1].is_graph_output())
    has_float_weight = node.op_type in WEIGHT_QUANTIZED_OPERATORS and not _is_dequantized(node.inputs[1])
    return (has_float_weight or node.op_type == "Softmax") and _is_dequantized_before_moves(node.inputs[0])


def _keep_in_float(graph: ir.Graph, node: ir.Node) -> None:
    """Separate a float node from the nodes that quantize its result."""
    result = node.outputs[0]
    while (reader := _find_only_reader(result)) is not None and reader.op_type in FUSED_ACTIVATIONS:
        result = reader.outputs[0]
    if not _is_quantized_after_moves(result):
        return
    last = result.producer()
    assert last is not None
    barrier = ir.node("Sum", [result], name=f"{last.name}/float")
    copy = barrier.outputs[0]
    copy.type, copy.shape = result.type, result.shape
    for use in [*result.uses()]:
        use.node.replace_input_with(use.idx, copy)
    graph.insert_after(last, barrier)
    barrier.replace_input_with(0, result)


def _find_only_reader(value: ir.Value) -> ir.Node | None:
    """Return the reader of a value, if it is the only one and the value is no output."""
    readers = [use.node for use in value.uses()]
    return readers[0] if len(readers) == 1 and not value.is_graph_output() else None


def _is_dequantized_before_moves(value: ir.Value | None) -> bool:
    """Whether a value is dequantized, directly or before data movement, which the runtime may do first."""
    producer = value.producer() if value is not None else None
    return producer is not None and _leads_to("DequantizeLinear", [producer], ir.Node.predecessors)


def _is_quantized_after_moves(value: ir.Value) -> bool:
    """Whether a value is quantized, directly or after data movement, which the runtime may do later."""
    return _leads_to("QuantizeLinear", [use.node for use in value.uses()], ir.Node.successors)


def _leads_to(kind: str, nodes: Sequence[ir.Node], step: Callable[[ir.Node], Sequence[ir.Node]]) -> bool:
    """Whether nodes of an ONNX operator are reached from given nodes, in steps from nodes that move data."""
    rest, seen = [*nodes], {*nodes}
    while rest:
        node = rest.pop()
        if node.op_type == kind:
            return True
        new = [each for each in step(node) if each not in seen] if node.op_type in PASSED_OPERATORS else []
        rest += new
        seen.update(new)
    return False


def _is_layer_norm_input(value: ir.Value) -> bool:
    return any(use.node.op_type == "LayerNormalization" for use in value.uses())


def _is_float_bias_add(node: ir.Node) -> bool:
    """Whether a node adds a float constant to a quantized product."""
    product, bias = (value.producer() if value is not None else None for value in node.inputs)
    if product is None or product.op_type != "MatMul" or bias is not None:
        return False
    return all(_is_dequantized(factor) for factor in product.inputs)


def _is_float_clip(node: ir.Node) -> bool:
    """Whether a node clips a product with a quantized weight, with at least one float reader."""
    readers = [use.node.op_type for use in node.outputs[0].uses()]
    if readers == ["QuantizeLinear"]:
        return False
    made = node.inputs[0].producer() if node.inputs[0] is not None else None
    if made is not None and made.op_type in ("Add", "Sum"):  # a bias
        made = next((m for v in made.inputs if v is not None and (m := v.producer()) is not None), None)
    return made is not None and made.op_type in ("Gemm", "MatMul") and _is_dequantized(made.inputs[1])


def _is_dequantized(value: ir.Value | None) -> bool:
    made = value.producer() if value is not None else None
    if made is not None and made.op_type == "Transpose":
        return _is_dequantized(made.inputs[0])
    return made is not None and made.op_type == "DequantizeLinear"


def _replace_by_min_max(graph: ir.Graph, node: ir.Node) -> None:
    """Rewrite a clip as ``Max`` and ``Min``."""
    x, result = node.inputs[0], node.outputs[0]
    assert x is not None
    low, high = (_add_zero(graph, node, result), None) if node.op_type == "Relu" else (*node.inputs[1:], None, None)[:2]
    bounds = [(kind, end) for kind, end in (("Max", low), ("Min", high)) if end is not None]
    made: list[ir.Node] = []
    for kind, end in bounds:
        made.append(ir.node(kind, [x, end], name=f"{node.name}/{kind}"))
        x = made[-1].outputs[0]
        x.type, x.shape = result.type, result.shape
    if made:
        ir.convenience.replace_nodes_and_values(graph, node, [node], made, [result], [x])


def _add_zero(graph: ir.Graph, node: ir.Node, result: ir.Value) -> ir.Value:
    name = f"{node.name}/zero"
    tensor = tensor_adapters.TorchTensor(torch.zeros(()), name=name)
    zero = ir.Value(name=name, shape=ir.Shape(()), type=result.type, const_value=tensor)
    graph.register_initializer(zero)
    return zero
