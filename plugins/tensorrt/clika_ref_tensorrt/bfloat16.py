"""What a file computes in bfloat16, for a runtime that has no such kernels: in float32, each result rounded."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import onnx
from onnx import GraphProto, ModelProto, NodeProto, TensorProto
from onnx.helper import make_node

NARROW, WHOLE = TensorProto.BFLOAT16, TensorProto.FLOAT


def computes_in_bfloat16(model: ModelProto) -> bool:
    """Whether a file has any value of bfloat16."""
    return any(True for graph in _graphs(model.graph) for _ in _narrow(graph))


def rounding_to_bfloat16(model: ModelProto) -> ModelProto:
    """Return a file that computes the same in float32, and rounds whatever was bfloat16 to that.

    Every value ``v`` of bfloat16 is still there; what computes it makes a ``v/made``, and who reads it a ``v/read``.

    Args:
        model: with its weights.
    """
    inferred = onnx.shape_inference.infer_shapes(model, data_prop=False)
    names = {name for graph in _graphs(inferred.graph) for name in _narrow(graph)}
    for graph in _graphs(inferred.graph):
        _widen(graph, names)
    return inferred


def _graphs(graph: GraphProto) -> Iterator[GraphProto]:
    """Yield a graph, and those of its branches and loops."""
    yield graph
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.type == onnx.AttributeProto.GRAPH:
                yield from _graphs(attribute.g)


def _narrow(graph: GraphProto) -> Iterator[str]:
    """Yield the names of what is bfloat16."""
    yield from (tensor.name for tensor in graph.initializer if tensor.data_type == NARROW)
    for value in (*graph.input, *graph.value_info, *graph.output):
        if value.type.tensor_type.elem_type == NARROW:
            yield value.name


def _widen(graph: GraphProto, names: set[str]) -> None:
    given = {tensor.name for tensor in graph.initializer}
    nodes = [_read(value.name) for value in graph.input if value.name in names - given]
    for tensor in [t for t in graph.initializer if t.name in names]:
        tensor.CopyFrom(_whole(tensor, f"{tensor.name}/read"))
    for node in graph.node:
        nodes.extend(_widened(node, names))
    del graph.node[:]
    graph.node.extend(nodes)


def _widened(node: NodeProto, names: set[str]) -> Iterable[NodeProto]:
    """Return a node that computes in float32, and behind it what rounds its results."""
    made = [name for name in node.output if name in names]
    for position, name in enumerate(node.input):
        node.input[position] = f"{name}/read" if name in names else name
    for position, name in enumerate(node.output):
        node.output[position] = f"{name}/made" if name in names else name
    for attribute in node.attribute:
        if attribute.name in {"to", "dtype"} and attribute.i == NARROW:
            attribute.i = WHOLE
        if attribute.type == onnx.AttributeProto.TENSOR and attribute.t.data_type == NARROW:
            attribute.t.CopyFrom(_whole(attribute.t, attribute.t.name))
    rounded = [make_node("Cast", [f"{name}/made"], [name], name=f"{name}/rounding", to=NARROW) for name in made]
    return [node, *rounded, *map(_read, made)]


def _read(name: str) -> NodeProto:
    return make_node("Cast", [name], [f"{name}/read"], name=f"{name}/reading", to=WHOLE)


def _whole(tensor: TensorProto, name: str) -> TensorProto:
    return onnx.numpy_helper.from_array(onnx.numpy_helper.to_array(tensor).astype("float32"), name)
