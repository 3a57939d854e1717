"""Write the biases of convolutions in INT8 files as additions, as the runtime loses some of them otherwise."""

from __future__ import annotations

from typing import Any

import onnx_ir as ir
from onnx_ir import tensor_adapters

CONVOLUTIONS = ("Conv", "ConvTranspose")


def separate_biases(model: ir.Model) -> None:
    """Write the constant bias of each convolution as an ``Add`` after it, if the model has quantized nodes.

    OpenVINO 2026.4 reads a bias in the convolution as one whose shape it computes from that of the result. If other
    nodes compute with sizes, such as a resize in a network with a dynamic batch, that shape is not constant when INT8
    layers are fused, and the bias and the activation after it are dropped. Both forms take the same time.
    """
    graph = model.graph
    if not any(node.op_type == "QuantizeLinear" for node in graph):
        return
    for node in [*graph]:
        if node.op_type in CONVOLUTIONS and len(node.inputs) > 2 and node.inputs[2] is not None:
            bias, rank = node.inputs[2], None if node.outputs[0].shape is None else len(node.outputs[0].shape)
            if bias.const_value is not None and rank is not None and not bias.is_graph_input():
                _separate_bias(graph, node, bias, rank)


def _separate_bias(graph: ir.Graph, node: ir.Node, bias: ir.Value, rank: int) -> None:
    result = node.outputs[0]
    stored: Any = bias.const_value
    stored = stored.raw() if isinstance(stored, ir.LazyTensor) else stored
    name, channels = f"{node.name}/bias", stored.raw.reshape(-1, *[1] * (rank - 2))  # a tensor of PyTorch
    tensor = tensor_adapters.TorchTensor(channels, name=name)
    own = ir.Value(name=name, shape=ir.Shape(channels.shape), type=bias.type, const_value=tensor)
    graph.register_initializer(own)
    plain = ir.node(node.op_type, node.inputs[:2], attributes=node.attributes, name=node.name, version=node.version)
    added = ir.node("Add", [plain.outputs[0], own], name=f"{node.name}/add_bias")
    for made in (plain, added):
        made.outputs[0].type, made.outputs[0].shape = result.type, result.shape
        made.meta.update(node.meta)
        made.metadata_props.update(node.metadata_props)
    ir.convenience.replace_nodes_and_values(graph, node, [node], [plain, added], [result], [added.outputs[0]])
    if not bias.uses() and bias.name is not None:
        graph.initializers.pop(bias.name, None)
