"""An ONNX graph as seen by the rules: producers and readers of each value, and constants."""

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

MOVING_OPERATORS = IDENTITY_OPERATORS | {
    "Reshape", "Transpose", "Squeeze", "Unsqueeze", "Flatten", "MaxPool", "Slice", "Gather", "GatherElements",
    "GatherND", "Expand", "Tile", "ReverseSequence", "Split", "DepthToSpace", "SpaceToDepth", "Pad", "Cast",
}  # fmt: skip
"""Operators that TensorRT can swap with a QuantizeLinear after them, and with a DequantizeLinear before them."""

ORDER_KEEPING_OPERATORS = IDENTITY_OPERATORS | {"Cast", "Reshape", "Squeeze", "Unsqueeze", "Flatten", "Expand"}
"""Operators that keep the elements of a constant in order."""

WEIGHT_KEEPING_OPERATORS = ORDER_KEEPING_OPERATORS | {"Transpose"}
"""Operators that keep a weight a weight."""


class OnnxFile:
    """One graph of a file: the main graph, or a branch or loop body, which also sees the graphs around it."""

    def __init__(
        self,
        model: onnx.ModelProto,
        *,
        folder: Path | None = None,
        has_weight_only: bool = False,
        branch: tuple[onnx.GraphProto, onnx.GraphProto, OnnxFile] | None = None,
    ) -> None:
        """Wrap a whole file, or a branch given by its graph, the inferred graph, and the enclosing one."""
        self.model, self.folder, self.has_weight_only = model, folder, has_weight_only
        self.graph, self.enclosing = (model.graph, None) if branch is None else (branch[0], branch[2])
        self._inferred = None if branch is None else branch[1]
        self.nodes = [node for node in self.graph.node if node.domain in CHECKED_DOMAINS]
        self.makers = self._chain_with_enclosing(
            {name: node for node in self.nodes for name in node.output if name}, "makers"
        )
        self.initializers = self._chain_with_enclosing({t.name: t for t in self.graph.initializer}, "initializers")
        self.readers: dict[str, list[onnx.NodeProto]] = {}
        for node in self.all_nodes:
            for name in node.input:
                self.readers.setdefault(name, []).append(node)
        self.outputs = frozenset(v.name for v in self.graph.output)
        self._origins: dict[frozenset[str], dict[str, str]] = {}
        self._constants: dict[str, np.ndarray[Any, Any] | None] = {}
        self._found: dict[object, object] = {}

    def _chain_with_enclosing(self, own: dict[str, T], what: str) -> Mapping[str, T]:
        """Return a graph's own entries, chained with those visible from enclosing graphs."""
        return own if self.enclosing is None else ChainMap(own, getattr(self.enclosing, what))

    def compute_once(self, look: Callable[[OnnxFile], T]) -> T:
        """Return the cached result of a function on the graph."""
        if look not in self._found:
            self._found[look] = look(self)
        return cast("T", self._found[look])

    def extend_enclosing(
        self, own: dict[str, T], look: Callable[[OnnxFile], MutableMapping[str, T]]
    ) -> MutableMapping[str, T]:
        """Return a mapping with a graph's own entries, on top of the function's result for the enclosing graph."""
        return own if self.enclosing is None else ChainMap(own, self.enclosing.compute_once(look))

    @cached_property
    def stripped_model(self) -> onnx.ModelProto:
        """The model without its large constants."""
        return strip_constants(self.model, self.folder)

    @cached_property
    def inference(self) -> tuple[onnx.GraphProto, str]:
        """The main graph with inferred types, and the reason if ONNX rejects them."""
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
        """The version of ONNX's own operators; 0 if the file declares none."""
        return next((int(o.version) for o in self.model.opset_import if o.domain in ONNX_DOMAINS), 0)

    @cached_property
    def values(self) -> Mapping[str, onnx.TypeProto.Tensor]:
        """The types of values, as far as declared or inferred."""
        return self._chain_with_enclosing({v.name: v.type.tensor_type for v in _all_values(self.inferred)}, "values")

    @cached_property
    def types(self) -> Mapping[str, int]:
        """The element types of values; 0 if unknown."""
        known = {v.name: int(v.type.tensor_type.elem_type) for v in _all_values(self.inferred)}
        return self._chain_with_enclosing(known | {t.name: int(t.data_type) for t in self.graph.initializer}, "types")

    def dims(self, name: str) -> list[int | None] | None:
        """Return the dims of a value, None for each dynamic one; None if the rank is unknown."""
        if name in self.initializers:
            return [*self.initializers[name].dims]
        kind = self.values.get(name)
        if kind is None or not kind.HasField("shape"):
            return None
        return [dim.dim_value if dim.HasField("dim_value") else None for dim in kind.shape.dim]

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
        made = self.source(name, ORDER_KEEPING_OPERATORS)
        if made is None or made.op_type != DEQUANTIZE:  # scales of blocks may be quantized themselves
            return self._apply_moves(name, self._read_stored(self.origin(name, ORDER_KEEPING_OPERATORS)))
        found, scale = (
            self._apply_moves(one, self._read_stored(self.origin(one, ORDER_KEEPING_OPERATORS)))
            for one in made.input[:2]
        )
        if found is None or scale is None or scale.size != 1:
            return None
        return self._apply_moves(name, found.astype(np.float32) * scale)

    def _apply_moves(self, name: str, found: np.ndarray[Any, Any] | None) -> np.ndarray[Any, Any] | None:
        """Apply the casts and expansions between the origin of a value and the value itself."""
        for result in [*self.trace_back(name, ORDER_KEEPING_OPERATORS)][-2::-1]:
            node = self.makers[result]
            if found is not None and node.op_type == "Cast":
                found = convert_elements(found, self.attribute(node, "to", 0))
            elif found is not None and node.op_type == "Expand":
                found = expand_elements(found, self.shape(result))
        return found

    def _read_stored(self, name: str) -> np.ndarray[Any, Any] | None:
        """Return the numbers stored in the file or in external data."""
        node, found = self.makers.get(name), None
        if name in self.initializers:
            found = read_elements(self.initializers[name], self.folder)
        elif node is not None and node.op_type == "Constant" and node.attribute:
            stated = onnx.helper.get_attribute_value(node.attribute[0])
            is_tensor = isinstance(stated, onnx.TensorProto)
            found = read_elements(stated, self.folder) if is_tensor else np.asarray(stated)
        return found if found is not None and found.dtype.kind not in "OSU" else None

    @cached_property
    def constants(self) -> Container[str]:
        """The values computed only from constants, by operators that move elements."""
        found = dict.fromkeys((t.name for t in self.graph.initializer), True)
        seen = self._chain_with_enclosing(found, "constants")
        for node in self.nodes:
            if node.op_type in MOVING_OPERATORS | {"Constant"} and all(name in seen for name in node.input if name):
                found.update(dict.fromkeys(node.output, True))
        return seen

    def is_weight(self, quantizer: onnx.NodeProto) -> bool:
        """Whether a node quantizes or dequantizes a constant."""
        source = quantizer.input[0]
        made = self.source(source, WEIGHT_KEEPING_OPERATORS)
        if quantizer.op_type == DEQUANTIZE and made is not None and made.op_type == QUANTIZE:
            source = made.input[0]
        return source in self.constants

    def is_moving(self, node: onnx.NodeProto, over: frozenset[str] = MOVING_OPERATORS) -> bool:
        """Whether a node only moves elements of its first operand; Pad may only add zeros.

        A Cast between floats counts, too; for constants, any Cast does.
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
        """Return the name of a value before it was moved."""
        known, path = self._origins.setdefault(over, {}), list[str]()
        while name not in known:
            known[name] = name  # also terminates a cycle
            path.append(name)
            node = self.makers.get(name)
            if name in self.initializers or node is None or not self.is_moving(node, over):
                break
            name = node.input[0]
        known.update(dict.fromkeys(path, known[name]))
        return known[name]

    def trace_back(self, name: str, over: frozenset[str] = MOVING_OPERATORS) -> Iterator[str]:
        """Yield a value and its predecessors, up to its origin."""
        yield name
        for _ in self.nodes:  # a longer path would be a cycle
            if name == self.origin(name, over):
                return
            name = self.makers[name].input[0]
            yield name

    def source(self, name: str, over: frozenset[str] = MOVING_OPERATORS) -> onnx.NodeProto | None:
        """Return the node that produced a value before it was moved."""
        return self.makers.get(self.origin(name, over))

    def dequantizer(self, name: str) -> onnx.NodeProto | None:
        """Return the node that dequantized a value before it was moved."""
        node = self.source(name)
        return node if node is not None and node.op_type == DEQUANTIZE else None

    def sinks(self, name: str, over: frozenset[str] = MOVING_OPERATORS) -> Iterator[onnx.NodeProto]:
        """Yield the readers of a value, passing through nodes that only move it."""
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
        """Return the readers of a quantized value after its dequantizers."""
        return [reader for node in self.dequantizers_of(quantized) for reader in self.sinks(node.output[0])]

    def attribute(self, node: onnx.NodeProto, name: str, default: Any) -> Any:
        """Return an attribute of a node."""
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
        stated = int(self.attribute(node, "block_size", 0))
        dims, scales = self.shape(node.input[0]), self.shape(node.input[1])
        if stated or node.domain in ONNX_DOMAINS or not dims or not scales or len(dims) != len(scales):
            return stated
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
    return iter((*graph.input, *graph.value_info, *graph.output))


def _iterate_inner_graphs(graph: onnx.GraphProto) -> Iterator[tuple[onnx.NodeProto, str, onnx.GraphProto]]:
    """Yield the nested graphs of a graph's nodes."""
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.type == onnx.AttributeProto.GRAPH:
                yield node, attribute.name, attribute.g
