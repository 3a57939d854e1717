"""`OnnxFile`, an ONNX graph with the lookups of the rules: producers and readers, types, constants, moved values."""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Callable, Container, Iterator, Mapping, MutableMapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar, cast

import numpy as np
import onnx

from clika_ref_tensorrt.own_operators import (
    CHECKED_DOMAINS,
    DEQUANTIZE,
    ONNX_DOMAINS,
    QUANTIZE,
    QUANTIZED_TYPE_ATTRIBUTE,
    graphs_of,
)
from clika_ref_tensorrt.stripped_model import (
    convert_elements,
    expand_elements,
    infer_types,
    read_elements,
    strip_constants,
)

T = TypeVar("T")

FLOAT_TYPES = (onnx.TensorProto.FLOAT, onnx.TensorProto.FLOAT16, onnx.TensorProto.BFLOAT16)

IDENTITY_OPERATORS = frozenset({"Identity", "Dropout"})
"""Operators without effect in inference."""

MOVING_OPERATORS = IDENTITY_OPERATORS | {  # `OnnxFile.is_moving` limits Pad and Cast
    "Reshape", "Transpose", "Squeeze", "Unsqueeze", "Flatten", "MaxPool", "Slice", "Gather", "GatherElements",
    "GatherND", "Expand", "Tile", "ReverseSequence", "Split", "DepthToSpace", "SpaceToDepth", "Pad", "Cast",
}  # fmt: skip
"""Operators that move elements. TensorRT can swap them with a QuantizeLinear after them, or a DequantizeLinear before
them.
"""

ORDER_KEEPING_OPERATORS = IDENTITY_OPERATORS | {"Cast", "Reshape", "Squeeze", "Unsqueeze", "Flatten", "Expand"}
"""Operators that keep the elements of a constant in order."""

WEIGHT_KEEPING_OPERATORS = ORDER_KEEPING_OPERATORS | {"Transpose"}
"""Operators that a constant may pass and still count as a weight."""


class OnnxFile:
    """One graph of a file: the main graph, or a branch or loop body, which also sees the graphs that enclose it."""

    def __init__(
        self,
        model: onnx.ModelProto,
        *,
        folder: Path | None = None,
        has_weight_only: bool = False,
        branch: tuple[onnx.GraphProto, onnx.GraphProto, OnnxFile] | None = None,
    ) -> None:
        """Wrap the main graph of a file, or a nested graph.

        Args:
            model: the whole file.
            folder: the folder of external data.
            has_weight_only: whether 8-bit weights may be multiplied with floats.
            branch: for a nested graph: itself, itself with inferred types, and the enclosing graph.
        """
        self.model, self.folder, self.has_weight_only = model, folder, has_weight_only
        self.graph, self.enclosing = (model.graph, None) if branch is None else (branch[0], branch[2])
        self._inferred = None if branch is None else branch[1]
        self.nodes = [node for node in self.graph.node if node.domain in CHECKED_DOMAINS]
        self.producers = self._chain_with_enclosing(
            {name: node for node in self.nodes for name in node.output if name}, "producers"
        )
        self.initializers = self._chain_with_enclosing({t.name: t for t in self.graph.initializer}, "initializers")
        self.readers: dict[str, list[onnx.NodeProto]] = {}
        for node in self.all_nodes:
            for name in node.input:
                self.readers.setdefault(name, []).append(node)
        self.outputs = frozenset(v.name for v in self.graph.output)
        self._origins: dict[frozenset[str], dict[str, str]] = {}
        self._constants: dict[str, np.ndarray[Any, Any] | None] = {}
        self._computed: dict[object, object] = {}

    def _chain_with_enclosing(self, own: dict[str, T], attribute: str) -> Mapping[str, T]:
        """Return a mapping with the graph's own entries, then those of the same attribute of the enclosing graph."""
        return own if self.enclosing is None else ChainMap(own, getattr(self.enclosing, attribute))

    def compute_once(self, function: Callable[[OnnxFile], T]) -> T:
        """Return the result of a function on the graph, computed on the first call."""
        if function not in self._computed:
            self._computed[function] = function(self)
        return cast("T", self._computed[function])

    def extend_enclosing(
        self, own: dict[str, T], function: Callable[[OnnxFile], MutableMapping[str, T]]
    ) -> MutableMapping[str, T]:
        """Return a mapping with the graph's own entries, then the result of the function on the enclosing graph."""
        return own if self.enclosing is None else ChainMap(own, self.enclosing.compute_once(function))

    @cached_property
    def stripped_model(self) -> onnx.ModelProto:
        """The model without its large constants."""
        return strip_constants(self.model, self.folder)

    @cached_property
    def inference(self) -> tuple[onnx.GraphProto, str]:
        """The main graph with inferred types, and the reason why ONNX rejects it; empty if it is valid."""
        return infer_types(self.stripped_model)

    @cached_property
    def inferred(self) -> onnx.GraphProto:
        """The graph with inferred types."""
        return self.inference[0] if self._inferred is None else self._inferred

    @cached_property
    def branches(self) -> Sequence[tuple[onnx.NodeProto, str, OnnxFile]]:
        """The nested graphs, each with its node and the name of its attribute."""
        return [
            (node, name, OnnxFile(
                self.model, folder=self.folder, has_weight_only=self.has_weight_only, branch=(own, typed, self)
            ))
            for (node, name, own), (_, _, typed) in zip(
                _iterate_inner_graphs(self.graph), _iterate_inner_graphs(self.inferred), strict=True
            )
        ]  # fmt: skip

    @cached_property
    def inner_graphs(self) -> Sequence[OnnxFile]:
        """All nested graphs, recursively."""
        return [file for _, _, one in self.branches for file in (one, *one.inner_graphs)]

    @cached_property
    def opset(self) -> int:
        """The opset version of ONNX's own domain; 0 if the file declares none."""
        return next((int(o.version) for o in self.model.opset_import if o.domain in ONNX_DOMAINS), 0)

    @cached_property
    def tensor_types(self) -> Mapping[str, onnx.TypeProto.Tensor]:
        """The types of values, with shapes, as far as declared or inferred."""
        own = {v.name: v.type.tensor_type for v in _all_values(self.inferred)}
        return self._chain_with_enclosing(own, "tensor_types")

    @cached_property
    def types(self) -> Mapping[str, int]:
        """The element types of values; 0 if unknown."""
        known = {v.name: int(v.type.tensor_type.elem_type) for v in _all_values(self.inferred)}
        return self._chain_with_enclosing(known | {t.name: int(t.data_type) for t in self.graph.initializer}, "types")

    def dims(self, name: str) -> list[int | None] | None:
        """Return the dims of a value, None for each dynamic one; None if the rank is unknown."""
        if name in self.initializers:
            return [*self.initializers[name].dims]
        tensor_type = self.tensor_types.get(name)
        if tensor_type is None or not tensor_type.HasField("shape"):
            return None
        return [dim.dim_value if dim.HasField("dim_value") else None for dim in tensor_type.shape.dim]

    def rank(self, name: str) -> int | None:
        """Return the rank of a value, or None if unknown."""
        dims = self.dims(name)
        return None if dims is None else len(dims)

    def shape(self, name: str) -> list[int] | None:
        """Return the shape of a value, or None if a dim is dynamic or unknown."""
        known = [dim for dim in self.dims(name) or [None] if dim is not None]
        return known if len(known) == self.rank(name) else None

    def constant(self, name: str) -> np.ndarray[Any, Any] | None:
        """Return the elements of a constant after its casts and expansions, or None for a computed value.

        Raises:
            TargetError: the elements are in another file, which cannot be read.
        """
        if name not in self._constants:
            self._constants[name] = self._decode_constant(name)
        return self._constants[name]

    def _decode_constant(self, name: str) -> np.ndarray[Any, Any] | None:
        """Return the elements of a constant, dequantized with a single scale if it is quantized."""
        source = self.source(name, ORDER_KEEPING_OPERATORS)
        if source is None or source.op_type != DEQUANTIZE:
            return self._read_origin(name)
        elements, scale = (self._read_origin(operand) for operand in source.input[:2])  # such as quantized scales
        if elements is None or scale is None or scale.size != 1:
            return None
        return self._apply_moves(name, elements.astype(np.float32) * scale)

    def _read_origin(self, name: str) -> np.ndarray[Any, Any] | None:
        """Return the stored elements of a value's origin, after the casts and expansions up to the value."""
        return self._apply_moves(name, self._read_stored(self.origin(name, ORDER_KEEPING_OPERATORS)))

    def _apply_moves(self, name: str, elements: np.ndarray[Any, Any] | None) -> np.ndarray[Any, Any] | None:
        """Apply the casts and expansions between the origin of a value and the value itself."""
        results = [*self.trace_back(name, ORDER_KEEPING_OPERATORS)][:-1]  # without the origin
        for result in reversed(results):
            node = self.producers[result]
            if elements is not None and node.op_type == "Cast":
                elements = convert_elements(elements, self.attribute(node, "to", 0))
            elif elements is not None and node.op_type == "Expand":
                elements = expand_elements(elements, self.shape(result))
        return elements

    def _read_stored(self, name: str) -> np.ndarray[Any, Any] | None:
        """Return the elements of an initializer or Constant; None for a computed value, or if they are no numbers."""
        node, elements = self.producers.get(name), None
        if name in self.initializers:
            elements = read_elements(self.initializers[name], self.folder)
        elif node is not None and node.op_type == "Constant" and node.attribute:
            data = onnx.helper.get_attribute_value(node.attribute[0])
            elements = read_elements(data, self.folder) if isinstance(data, onnx.TensorProto) else np.asarray(data)
        return elements if elements is not None and elements.dtype.kind not in "OSU" else None

    @cached_property
    def constants(self) -> Container[str]:
        """The names of initializers and Constants, and of values that operators only move from them."""
        own = dict.fromkeys((t.name for t in self.graph.initializer), True)
        known = self._chain_with_enclosing(own, "constants")
        for node in self.nodes:
            if node.op_type in MOVING_OPERATORS | {"Constant"} and all(name in known for name in node.input if name):
                own.update(dict.fromkeys(node.output, True))
        return known

    def is_weight(self, quantizer: onnx.NodeProto) -> bool:
        """Whether a node quantizes a constant, or dequantizes it, also after a quantizer."""
        name = quantizer.input[0]
        source = self.source(name, WEIGHT_KEEPING_OPERATORS)
        if quantizer.op_type == DEQUANTIZE and source is not None and source.op_type == QUANTIZE:
            name = source.input[0]
        return name in self.constants

    def is_moving(self, node: onnx.NodeProto, over: frozenset[str] = MOVING_OPERATORS) -> bool:
        """Whether a node is one of ``over`` and only moves elements of its first operand.

        A Pad with constants must add zeros. Of `MOVING_OPERATORS`, a Cast must be between float types.
        """
        if node.op_type not in over or node.domain not in ONNX_DOMAINS:
            return False
        if node.op_type == "Cast" and over is MOVING_OPERATORS:
            kinds = self.types.get(node.input[0], 0), int(self.attribute(node, "to", 0))
            return kinds[0] in (0, *FLOAT_TYPES) and kinds[1] in FLOAT_TYPES
        if node.op_type != "Pad" or self.attribute(node, "mode", b"constant") != b"constant":
            return True
        if len(node.input) > 2 and node.input[2]:
            filler = self.constant(node.input[2])
            return filler is not None and not np.any(filler != 0)
        return float(self.attribute(node, "value", 0)) == 0  # before opset 11

    def origin(self, name: str, over: frozenset[str] = MOVING_OPERATORS) -> str:
        """Return the first value of a path of moving nodes to a value, by name; the value itself if there is none."""
        known, path = self._origins.setdefault(over, {}), list[str]()
        while name not in known:
            known[name] = name  # also terminates a cycle
            path.append(name)
            node = self.producers.get(name)
            if name in self.initializers or node is None or not self.is_moving(node, over):
                break
            name = node.input[0]
        known.update(dict.fromkeys(path, known[name]))
        return known[name]

    def trace_back(self, name: str, over: frozenset[str] = MOVING_OPERATORS) -> Iterator[str]:
        """Yield a value and the values that it was moved from, up to its origin."""
        yield name
        for _ in self.nodes:  # a longer path would be a cycle
            if name == self.origin(name, over):
                return
            name = self.producers[name].input[0]
            yield name

    def source(self, name: str, over: frozenset[str] = MOVING_OPERATORS) -> onnx.NodeProto | None:
        """Return the node that produces the origin of a value; None for an input or initializer."""
        return self.producers.get(self.origin(name, over))

    def dequantizer(self, name: str) -> onnx.NodeProto | None:
        """Return the node that dequantizes the origin of a value, or None."""
        node = self.source(name)
        return node if node is not None and node.op_type == DEQUANTIZE else None

    def sinks(self, name: str, over: frozenset[str] = MOVING_OPERATORS) -> Iterator[onnx.NodeProto]:
        """Yield the readers of a value, and those of values moved from it, without the moving nodes."""
        waiting, seen = [name], {name}
        while waiting:
            name = waiting.pop()
            for node in self.readers.get(name, []):
                if node.input[0] == name and self.is_moving(node, over):
                    waiting += [result for result in node.output if result and result not in seen]
                    seen.update(node.output)
                else:
                    yield node

    def dequantizers_of(self, quantized: str) -> list[onnx.NodeProto]:
        """Return the dequantizers of a quantized value."""
        readers = self.readers.get(quantized, [])
        return [node for node in readers if node.op_type == DEQUANTIZE and node.domain in CHECKED_DOMAINS]

    def readers_after_pairs(self, quantized: str) -> list[onnx.NodeProto]:
        """Return the nodes that read a quantized value through its dequantizers."""
        return [reader for node in self.dequantizers_of(quantized) for reader in self.sinks(node.output[0])]

    def attribute(self, node: onnx.NodeProto, name: str, default: Any) -> Any:
        """Return an attribute of a node, or the default."""
        found = next((a for a in node.attribute if a.name == name), None)
        return default if found is None else onnx.helper.get_attribute_value(found)

    def axis(self, node: onnx.NodeProto, rank: int) -> int:
        """Return the scale axis of a quantizer or dequantizer, for a tensor of the given rank."""
        axis = int(self.attribute(node, "axis", 1))
        return axis + rank if axis < 0 else axis

    def block(self, node: onnx.NodeProto) -> int:
        """Return the block size of a quantizer or dequantizer; 0 without blocks.

        TensorRT's own operators may omit it, since the shape of the scales implies it.
        """
        block_size = int(self.attribute(node, "block_size", 0))
        dims, scales = self.shape(node.input[0]), self.shape(node.input[1])
        if block_size or node.domain in ONNX_DOMAINS or not dims or not scales or len(dims) != len(scales):
            return block_size
        return next((dim // count for dim, count in zip(dims, scales, strict=True) if dim > count > 0), 0)

    def integer_type(self, node: onnx.NodeProto) -> int:
        """Return the quantized type of a quantizer or dequantizer; uint8 by default."""
        if declared := int(self.attribute(node, QUANTIZED_TYPE_ATTRIBUTE, 0)):
            return declared
        if len(node.input) > 2 and node.input[2]:
            return self.types.get(node.input[2], 0)
        if node.op_type == DEQUANTIZE:
            return self.types.get(node.input[0], 0)
        return int(self.attribute(node, "output_dtype", 0)) or onnx.TensorProto.UINT8

    @cached_property
    def all_nodes(self) -> Sequence[onnx.NodeProto]:
        """The nodes of the graph and of all nested graphs."""
        return [node for graph in graphs_of(self.graph) for node in graph.node]

    def nodes_of_type(self, *kinds: str) -> Sequence[onnx.NodeProto]:
        """Return the nodes of the given op types."""
        return [node for node in self.nodes if node.op_type in kinds]


def _all_values(graph: onnx.GraphProto) -> Iterator[Any]:
    """Return the declared and inferred values of a graph."""
    return iter((*graph.input, *graph.value_info, *graph.output))


def _iterate_inner_graphs(graph: onnx.GraphProto) -> Iterator[tuple[onnx.NodeProto, str, onnx.GraphProto]]:
    """Yield the nested graphs of a graph's nodes, each with its node and the name of its attribute."""
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.type == onnx.AttributeProto.GRAPH:
                yield node, attribute.name, attribute.g
