"""Emulation of bfloat16 for runtimes without such kernels: compute in float32 and round each result."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import onnx
from onnx import GraphProto, ModelProto, NodeProto, TensorProto
from onnx.helper import make_node

from clika_ref_tensorrt.own_operators import graphs_of

BFLOAT16, FLOAT32 = TensorProto.BFLOAT16, TensorProto.FLOAT


def computes_in_bfloat16(model: ModelProto) -> bool:
    """Whether a file has any bfloat16 value."""
    return any(True for graph in graphs_of(model.graph) for _ in _bfloat16_names(graph))


def emulate_bfloat16(model: ModelProto) -> ModelProto:
    """Return a file that computes the same in float32, and rounds all bfloat16 values.

    Each bfloat16 value ``v`` remains; its producer now makes ``v/made``, and its readers read ``v/read``.

    Args:
        model: the model with its weights.
    """
    inferred = onnx.shape_inference.infer_shapes(model, data_prop=False)
    names = {name for graph in graphs_of(inferred.graph) for name in _bfloat16_names(graph)}
    for graph in graphs_of(inferred.graph):
        _widen_graph(graph, names)
    return inferred


def _bfloat16_names(graph: GraphProto) -> Iterator[str]:
    """Yield the names of bfloat16 values."""
    yield from (tensor.name for tensor in graph.initializer if tensor.data_type == BFLOAT16)
    for value in (*graph.input, *graph.value_info, *graph.output):
        if value.type.tensor_type.elem_type == BFLOAT16:
            yield value.name


def _widen_graph(graph: GraphProto, names: set[str]) -> None:
    given = {tensor.name for tensor in graph.initializer}
    nodes = [_make_read_cast(value.name) for value in graph.input if value.name in names - given]
    for tensor in [t for t in graph.initializer if t.name in names]:
        tensor.CopyFrom(_to_float32(tensor, f"{tensor.name}/read"))
    for node in graph.node:
        nodes.extend(_widen_node(node, names))
    del graph.node[:]
    graph.node.extend(nodes)


def _widen_node(node: NodeProto, names: set[str]) -> Iterable[NodeProto]:
    """Return a node that computes in float32, followed by casts that round its results."""
    made = [name for name in node.output if name in names]
    for position, name in enumerate(node.input):
        node.input[position] = f"{name}/read" if name in names else name
    for position, name in enumerate(node.output):
        node.output[position] = f"{name}/made" if name in names else name
    for attribute in node.attribute:
        if attribute.name in {"to", "dtype"} and attribute.i == BFLOAT16:
            attribute.i = FLOAT32
        if attribute.type == onnx.AttributeProto.TENSOR and attribute.t.data_type == BFLOAT16:
            attribute.t.CopyFrom(_to_float32(attribute.t, attribute.t.name))
    rounded = [make_node("Cast", [f"{name}/made"], [name], name=f"{name}/rounding", to=BFLOAT16) for name in made]
    return [node, *rounded, *map(_make_read_cast, made)]


def _make_read_cast(name: str) -> NodeProto:
    return make_node("Cast", [name], [f"{name}/read"], name=f"{name}/reading", to=FLOAT32)


def _to_float32(tensor: TensorProto, name: str) -> TensorProto:
    return onnx.numpy_helper.from_array(onnx.numpy_helper.to_array(tensor).astype("float32"), name)
