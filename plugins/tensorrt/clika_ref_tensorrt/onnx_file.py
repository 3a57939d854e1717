"""An ONNX graph as the rules look at it: who makes and reads each value, and what is constant."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import onnx

QUANTIZE, DEQUANTIZE = "QuantizeLinear", "DequantizeLinear"

STEPPING_OVER = frozenset({"Cast", "Identity", "Reshape", "Transpose", "Squeeze", "Unsqueeze", "Flatten"})
"""Operators behind which a constant is one still."""

MOVING = STEPPING_OVER - {"Cast"} | {"MaxPool", "Slice", "Gather", "Expand", "Split", "Concat", "DepthToSpace"}
"""Operators before which a QuantizeLinear behind them moves, and behind which a DequantizeLinear before them does."""


class OnnxFile:
    """The nodes of one graph, those of its subgraphs not among them."""

    def __init__(self, model: onnx.ModelProto) -> None:
        self.model, self.graph = model, model.graph
        self.nodes: list[onnx.NodeProto] = [*model.graph.node]
        self.makers = {name: node for node in self.nodes for name in node.output if name}
        self.readers: dict[str, list[onnx.NodeProto]] = {}
        for node in self.nodes:
            for name in node.input:
                self.readers.setdefault(name, []).append(node)
        self.initializers = {t.name: t for t in model.graph.initializer}
        self.outputs = frozenset(v.name for v in model.graph.output)

    @cached_property
    def opset(self) -> int:
        """The version of ONNX's own operators; 0 where the file states none."""
        return next((int(o.version) for o in self.model.opset_import if o.domain in ("", "ai.onnx")), 0)

    @cached_property
    def types(self) -> dict[str, int]:
        """The element types of values, as far as the file or inference tells them."""
        try:
            graph = onnx.shape_inference.infer_shapes(self.model).graph
        except Exception:  # noqa: BLE001 - what inference refuses is told by the checker of onnx
            graph = self.graph
        typed: Iterator[Any] = iter((*graph.input, *graph.value_info, *graph.output))
        known = {v.name: int(v.type.tensor_type.elem_type) for v in typed}
        return known | {name: int(t.data_type) for name, t in self.initializers.items()}

    def tensor(self, name: str) -> onnx.TensorProto | None:
        """Return a constant as it is stored, None where a value is computed."""
        if name in self.initializers:
            return self.initializers[name]
        node = self.makers.get(name)
        if node is not None and node.op_type == "Constant":
            return next((a.t for a in node.attribute if a.name == "value"), None)
        return None

    def constant(self, name: str) -> np.ndarray[Any, Any] | None:
        """Return the elements of a constant, also behind a cast, None where a value is computed."""
        tensor = self.tensor(name)
        if tensor is not None:
            return np.asarray(onnx.numpy_helper.to_array(tensor))
        node = self.makers.get(name)
        return self.constant(node.input[0]) if node is not None and node.op_type in ("Cast", "Identity") else None

    def is_constant(self, name: str) -> bool:
        """Whether a value is computed from constants alone, by what moves elements."""
        node = self.makers.get(name)
        if name in self.initializers or (node is not None and node.op_type == "Constant"):
            return True
        return node is not None and node.op_type in STEPPING_OVER and self.is_constant(node.input[0])

    def is_weight(self, quantizer: onnx.NodeProto) -> bool:
        """Whether a node quantizes, or dequantizes, a constant."""
        source = quantizer.input[0]
        made = self.makers.get(source)
        if quantizer.op_type == DEQUANTIZE and made is not None and made.op_type == QUANTIZE:
            source = made.input[0]
        return self.is_constant(source)

    def dequantizer(self, name: str) -> onnx.NodeProto | None:
        """Return the node by which a value was made of integers."""
        node = self.makers.get(name)
        return node if node is not None and node.op_type == DEQUANTIZE else None

    def moved_dequantizer(self, name: str) -> onnx.NodeProto | None:
        """Return the node by which a value was made of integers before it was moved."""
        node = self.makers.get(name)
        while node is not None and node.op_type in MOVING:
            node = self.makers.get(node.input[0])
        return node if node is not None and node.op_type == DEQUANTIZE else None

    def behind_pair(self, quantizer: onnx.NodeProto) -> list[onnx.NodeProto]:
        """Return who reads what a quantizer makes, behind its dequantizers."""
        pairs = [n for n in self.readers.get(quantizer.output[0], []) if n.op_type == DEQUANTIZE]
        return [reader for n in pairs for reader in self.readers.get(n.output[0], [])]

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
