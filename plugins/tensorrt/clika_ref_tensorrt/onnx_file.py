"""An ONNX graph as the rules look at it: who makes and reads each value, and what is constant."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import onnx

QUANTIZE, DEQUANTIZE = "QuantizeLinear", "DequantizeLinear"

NOTHING = frozenset({"Identity", "Dropout"})
"""Operators that do nothing where a model is only run."""

MOVING = NOTHING | {
    "Reshape", "Transpose", "Squeeze", "Unsqueeze", "Flatten", "MaxPool", "Slice", "Gather", "Expand", "Split",
    "DepthToSpace", "SpaceToDepth",
}  # fmt: skip
"""Operators before which a QuantizeLinear behind them moves, and behind which a DequantizeLinear before them does."""


class OnnxFile:
    """One graph of a file: the whole, or a branch or the body of a loop, which also sees what is around it."""

    def __init__(
        self,
        model: onnx.ModelProto,
        graph: onnx.GraphProto | None = None,
        around: OnnxFile | None = None,
        *,
        has_weights_alone: bool = False,
    ) -> None:
        self.has_weights_alone = has_weights_alone if around is None else around.has_weights_alone
        """Whether it is for a runtime that multiplies floats with weights of 8 bits, too."""
        self.model, self.graph, self.around = model, model.graph if graph is None else graph, around
        self.nodes: list[onnx.NodeProto] = [*self.graph.node]
        self.makers = {name: node for node in self.nodes for name in node.output if name}
        self.initializers = {t.name: t for t in self.graph.initializer}
        if around is not None:
            self.makers = {**around.makers, **self.makers}
            self.initializers = {**around.initializers, **self.initializers}
        self.readers: dict[str, list[onnx.NodeProto]] = {}
        for node in self.everywhere:
            for name in node.input:
                self.readers.setdefault(name, []).append(node)
        self.outputs = frozenset(v.name for v in self.graph.output)

    @cached_property
    def within(self) -> Sequence[OnnxFile]:
        """The graphs of its branches and loops, and theirs."""
        graphs = (a.g for node in self.nodes for a in node.attribute if a.type == onnx.AttributeProto.GRAPH)
        own = [OnnxFile(self.model, graph, self) for graph in graphs]
        return [file for one in own for file in (one, *one.within)]

    @cached_property
    def opset(self) -> int:
        """The version of ONNX's own operators; 0 where the file states none."""
        return next((int(o.version) for o in self.model.opset_import if o.domain in ("", "ai.onnx")), 0)

    @cached_property
    def values(self) -> dict[str, onnx.TypeProto.Tensor]:
        """The types of values, as far as the file or inference tells them."""
        known = dict(self.around.values) if self.around is not None else {}
        return known | {v.name: v.type.tensor_type for v in _typed(_inferred(self, known))}

    @cached_property
    def types(self) -> dict[str, int]:
        """The element types of values, 0 where nothing tells them."""
        known = {name: int(kind.elem_type) for name, kind in self.values.items()}
        return known | {name: int(t.data_type) for name, t in self.initializers.items()}

    def rank(self, name: str) -> int | None:
        """Return how many sides a value has, None where nothing tells."""
        kind = self.values.get(name)
        if kind is not None and kind.HasField("shape"):
            return len(kind.shape.dim)
        elements = self.constant(name)
        return None if elements is None else elements.ndim

    def shape(self, name: str) -> list[int] | None:
        """Return the sides of a value, None where one is dynamic or nothing tells."""
        kind = self.values.get(name)
        if kind is not None and kind.HasField("shape"):
            sides = [side.dim_value for side in kind.shape.dim]
            return sides if all(sides) else None
        elements = self.constant(name)
        return None if elements is None else [*elements.shape]

    def constant(self, name: str) -> np.ndarray[Any, Any] | None:
        """Return the elements of a constant, also behind a cast, None where a value is computed."""
        if name in self.initializers:
            return np.asarray(onnx.numpy_helper.to_array(self.initializers[name]))
        node = self.makers.get(name)
        if node is None or node.op_type not in ("Constant", "Cast", "Identity", DEQUANTIZE):
            return None
        if node.op_type == "Constant":
            found = onnx.helper.get_attribute_value(node.attribute[0])
            return np.asarray(onnx.numpy_helper.to_array(found) if isinstance(found, onnx.TensorProto) else found)
        first = self.constant(node.input[0])
        if node.op_type != DEQUANTIZE or first is None:
            return first
        scale = self.constant(node.input[1])  # scales of blocks may be integers themselves
        return first.astype(np.float32) * scale if scale is not None and scale.size == 1 else None

    def is_constant(self, name: str) -> bool:
        """Whether a value is computed from constants alone, by what moves elements."""
        node = self.makers.get(name)
        if name in self.initializers or (node is not None and node.op_type == "Constant"):
            return True
        return node is not None and node.op_type in MOVING | {"Cast"} and self.is_constant(node.input[0])

    def is_weight(self, quantizer: onnx.NodeProto) -> bool:
        """Whether a node quantizes, or dequantizes, a constant."""
        source = quantizer.input[0]
        made = self.makers.get(source)
        if quantizer.op_type == DEQUANTIZE and made is not None and made.op_type == QUANTIZE:
            source = made.input[0]
        return self.is_constant(source)

    def source(self, name: str, over: frozenset[str] = MOVING) -> onnx.NodeProto | None:
        """Return the node that made a value before it was moved."""
        node = self.makers.get(name)
        while node is not None and node.op_type in over:
            node = self.makers.get(node.input[0])
        return node

    def dequantizer(self, name: str) -> onnx.NodeProto | None:
        """Return the node by which a value was made of integers, before it was moved."""
        node = self.source(name)
        return node if node is not None and node.op_type == DEQUANTIZE else None

    def sinks(self, name: str, over: frozenset[str] = MOVING) -> Iterator[onnx.NodeProto]:
        """Yield who reads a value, those that only move it being followed to who reads that."""
        for node in self.readers.get(name, []):
            if node.op_type in over and node.input[0] == name:
                for result in node.output:
                    yield from self.sinks(result, over)
            else:
                yield node

    def behind_pairs(self, integers: str) -> list[onnx.NodeProto]:
        """Return who reads integers, behind their dequantizers."""
        pairs = [n for n in self.readers.get(integers, []) if n.op_type == DEQUANTIZE]
        return [reader for n in pairs for reader in self.sinks(n.output[0])]

    def attribute(self, node: onnx.NodeProto, name: str, default: Any) -> Any:
        """Return an attribute of a node."""
        found = next((a for a in node.attribute if a.name == name), None)
        return default if found is None else onnx.helper.get_attribute_value(found)

    def integer_type(self, node: onnx.NodeProto) -> int:
        """Return the type of the integers of a quantizer or dequantizer: uint8 where it says nothing."""
        if len(node.input) > 2 and node.input[2]:
            return self.types.get(node.input[2], 0)
        if node.op_type == DEQUANTIZE:
            return self.types.get(node.input[0], 0)
        return int(self.attribute(node, "output_dtype", 0)) or onnx.TensorProto.UINT8

    @cached_property
    def everywhere(self) -> Sequence[onnx.NodeProto]:
        """The nodes of the graph and of all graphs within."""
        found, graphs = list[onnx.NodeProto](), [self.graph]
        while graphs:
            graph = graphs.pop()
            found += graph.node
            graphs += [a.g for node in graph.node for a in node.attribute if a.type == onnx.AttributeProto.GRAPH]
        return found

    def of_kind(self, *kinds: str) -> Sequence[onnx.NodeProto]:
        """Return the nodes of some operators."""
        return [node for node in self.nodes if node.op_type in kinds]


def _typed(graph: onnx.GraphProto) -> Iterator[Any]:
    return iter((*graph.input, *graph.value_info, *graph.output))


def _inferred(file: OnnxFile, around: Mapping[str, onnx.TypeProto.Tensor]) -> onnx.GraphProto:
    """Return a graph with the types that inference finds, those of what is around it being known."""
    model = file.model
    if file.around is not None:
        model = onnx.ModelProto()
        model.CopyFrom(onnx.helper.make_model(file.graph, opset_imports=file.model.opset_import))
        own = {v.name for v in file.graph.input} | {t.name for t in file.graph.initializer}
        read = {name for node in file.nodes for name in node.input} & around.keys() - own
        for name in sorted(read):
            model.graph.input.add(name=name).type.tensor_type.CopyFrom(around[name])
    try:
        return onnx.shape_inference.infer_shapes(model).graph
    except Exception:  # noqa: BLE001 - what inference refuses is told by the checker of onnx
        return file.graph
