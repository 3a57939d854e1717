"""An ONNX graph as the rules look at it: who makes and reads each value, and what is constant."""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Callable, Container, Iterator, Mapping, MutableMapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar, cast

import numpy as np
import onnx

from clika_ref_tensorrt.outline import converted, elements, inferred, outline, repeated
from clika_ref_tensorrt.own_operators import (
    DEQUANTIZE,
    INTEGERS,
    ONNX_DOMAINS,
    QUANTIZE,
    READ,
    graphs_of,
)

Found = TypeVar("Found")

FLOATS = (onnx.TensorProto.FLOAT, onnx.TensorProto.FLOAT16, onnx.TensorProto.BFLOAT16)

NOTHING = frozenset({"Identity", "Dropout"})
"""Operators that do nothing where a model is only run."""

MOVING = NOTHING | {
    "Reshape", "Transpose", "Squeeze", "Unsqueeze", "Flatten", "MaxPool", "Slice", "Gather", "GatherElements",
    "GatherND", "Expand", "Tile", "ReverseSequence", "Split", "DepthToSpace", "SpaceToDepth", "Pad", "Cast",
}  # fmt: skip
"""Operators before which a QuantizeLinear behind them moves, and behind which a DequantizeLinear before them does."""

KEEPING = NOTHING | {"Cast", "Reshape", "Squeeze", "Unsqueeze", "Flatten", "Expand"}
"""Operators that keep the elements of a constant in their order."""

HOLDING = KEEPING | {"Transpose"}
"""Operators behind which a weight is a weight."""


class OnnxFile:
    """One graph of a file: the whole, or a branch or the body of a loop, which also sees what is around it."""

    def __init__(
        self,
        model: onnx.ModelProto,
        *,
        folder: Path | None = None,
        has_weights_alone: bool = False,
        branch: tuple[onnx.GraphProto, onnx.GraphProto, OnnxFile] | None = None,
    ) -> None:
        """Look at the whole of a file, or at a branch: its graph, the same as it was inferred, and what is around."""
        self.model, self.folder, self.has_weights_alone = model, folder, has_weights_alone
        self.graph, self.around = (model.graph, None) if branch is None else (branch[0], branch[2])
        self._inferred = None if branch is None else branch[1]
        self.nodes = [node for node in self.graph.node if node.domain in READ]
        self.makers = self._seen({name: node for node in self.nodes for name in node.output if name}, "makers")
        self.initializers = self._seen({t.name: t for t in self.graph.initializer}, "initializers")
        self.readers: dict[str, list[onnx.NodeProto]] = {}
        for node in self.everywhere:
            for name in node.input:
                self.readers.setdefault(name, []).append(node)
        self.outputs = frozenset(v.name for v in self.graph.output)
        self._origins: dict[frozenset[str], dict[str, str]] = {}
        self._constants: dict[str, np.ndarray[Any, Any] | None] = {}
        self._found: dict[object, object] = {}

    def _seen(self, own: dict[str, Found], what: str) -> Mapping[str, Found]:
        """Return what a graph has of its own, and what it sees of that around it."""
        return own if self.around is None else ChainMap(own, getattr(self.around, what))

    def once(self, look: Callable[[OnnxFile], Found]) -> Found:
        """Return what a function finds in the graph, which looks for it the first time only."""
        if look not in self._found:
            self._found[look] = look(self)
        return cast("Found", self._found[look])

    def on_top(
        self, own: dict[str, Found], look: Callable[[OnnxFile], MutableMapping[str, Found]]
    ) -> MutableMapping[str, Found]:
        """Return what was found in the graph, on top of what a function finds around it; what is added is its own."""
        return own if self.around is None else ChainMap(own, self.around.once(look))

    @cached_property
    def outline(self) -> onnx.ModelProto:
        """The file without its weights."""
        return outline(self.model, self.folder)

    @cached_property
    def inference(self) -> tuple[onnx.GraphProto, str]:
        """The whole graph with the types that ONNX infers, and why it refuses them."""
        return inferred(self.outline)

    @cached_property
    def inferred(self) -> onnx.GraphProto:
        """The graph with the types that inference finds."""
        return self.inference[0] if self._inferred is None else self._inferred

    @cached_property
    def branches(self) -> Sequence[tuple[onnx.NodeProto, str, OnnxFile]]:
        """The graphs that nodes have within, with the node and the name of the attribute."""
        return [
            (node, name, OnnxFile(
                self.model, folder=self.folder, has_weights_alone=self.has_weights_alone, branch=(own, typed, self)
            ))
            for (node, name, own), (_, _, typed) in zip(_inner(self.graph), _inner(self.inferred), strict=True)
        ]  # fmt: skip

    @cached_property
    def within(self) -> Sequence[OnnxFile]:
        """The graphs of its branches and loops, and theirs."""
        return [file for _, _, one in self.branches for file in (one, *one.within)]

    @cached_property
    def opset(self) -> int:
        """The version of ONNX's own operators; 0 where the file states none."""
        return next((int(o.version) for o in self.model.opset_import if o.domain in ONNX_DOMAINS), 0)

    @cached_property
    def values(self) -> Mapping[str, onnx.TypeProto.Tensor]:
        """The types of values, as far as the file or inference tells them."""
        return self._seen({v.name: v.type.tensor_type for v in _typed(self.inferred)}, "values")

    @cached_property
    def types(self) -> Mapping[str, int]:
        """The element types of values, 0 where nothing tells them."""
        known = {v.name: int(v.type.tensor_type.elem_type) for v in _typed(self.inferred)}
        return self._seen(known | {t.name: int(t.data_type) for t in self.graph.initializer}, "types")

    def sides(self, name: str) -> list[int | None] | None:
        """Return the sides of a value, each None where it is dynamic; None where nothing tells its rank."""
        if name in self.initializers:
            return [*self.initializers[name].dims]
        kind = self.values.get(name)
        if kind is None or not kind.HasField("shape"):
            return None
        return [side.dim_value if side.HasField("dim_value") else None for side in kind.shape.dim]

    def rank(self, name: str) -> int | None:
        """Return how many sides a value has, None where nothing tells."""
        sides = self.sides(name)
        return None if sides is None else len(sides)

    def shape(self, name: str) -> list[int] | None:
        """Return the sides of a value, None where one is dynamic or nothing tells."""
        known = [side for side in self.sides(name) or [None] if side is not None]
        return known if len(known) == self.rank(name) else None

    def constant(self, name: str) -> np.ndarray[Any, Any] | None:
        """Return the elements of a constant in their order, as it is cast and repeated; None where a value is computed.

        Raises:
            TargetError: they lie in another file, which cannot be read.
        """
        if name not in self._constants:
            self._constants[name] = self._decoded(name)
        return self._constants[name]

    def _decoded(self, name: str) -> np.ndarray[Any, Any] | None:
        made = self.source(name, KEEPING)
        if made is None or made.op_type != DEQUANTIZE:  # scales of blocks may be integers themselves
            return self._kept(name, self._stored(self.origin(name, KEEPING)))
        found, scale = (self._kept(one, self._stored(self.origin(one, KEEPING))) for one in made.input[:2])
        if found is None or scale is None or scale.size != 1:
            return None
        return self._kept(name, found.astype(np.float32) * scale)

    def _kept(self, name: str, found: np.ndarray[Any, Any] | None) -> np.ndarray[Any, Any] | None:
        """Return elements as they are behind the casts and repetitions that lie between their origin and a value."""
        for result in [*self.way_back(name, KEEPING)][-2::-1]:
            node = self.makers[result]
            if found is not None and node.op_type == "Cast":
                found = converted(found, self.attribute(node, "to", 0))
            elif found is not None and node.op_type == "Expand":
                found = repeated(found, self.shape(result))
        return found

    def _stored(self, name: str) -> np.ndarray[Any, Any] | None:
        """Return the numbers that are written in the file, or beside it."""
        node, found = self.makers.get(name), None
        if name in self.initializers:
            found = elements(self.initializers[name], self.folder)
        elif node is not None and node.op_type == "Constant" and node.attribute:
            stated = onnx.helper.get_attribute_value(node.attribute[0])
            is_tensor = isinstance(stated, onnx.TensorProto)
            found = elements(stated, self.folder) if is_tensor else np.asarray(stated)
        return found if found is not None and found.dtype.kind not in "OSU" else None

    @cached_property
    def constants(self) -> Container[str]:
        """What is computed from constants alone, by what moves elements."""
        found = dict.fromkeys((t.name for t in self.graph.initializer), True)
        seen = self._seen(found, "constants")
        for node in self.nodes:
            if node.op_type in MOVING | {"Constant"} and all(name in seen for name in node.input if name):
                found.update(dict.fromkeys(node.output, True))
        return seen

    def is_weight(self, quantizer: onnx.NodeProto) -> bool:
        """Whether a node quantizes, or dequantizes, a constant."""
        source = quantizer.input[0]
        made = self.source(source, HOLDING)
        if quantizer.op_type == DEQUANTIZE and made is not None and made.op_type == QUANTIZE:
            source = made.input[0]
        return source in self.constants

    def moves(self, node: onnx.NodeProto, over: frozenset[str] = MOVING) -> bool:
        """Whether a node only moves elements of its first operand; a Pad must not add others than 0.

        A Cast from floats to floats does, too; of constants, any.
        """
        if node.op_type not in over or node.domain not in ONNX_DOMAINS:
            return False
        if node.op_type == "Cast" and over is MOVING:
            kinds = self.types.get(node.input[0], 0), int(self.attribute(node, "to", 0))
            return kinds[0] in (0, *FLOATS) and kinds[1] in FLOATS
        if node.op_type != "Pad" or self.attribute(node, "mode", b"constant") != b"constant":
            return True
        if len(node.input) > 2 and node.input[2]:
            filler = self.constant(node.input[2])
            return filler is not None and not np.any(filler != 0)
        return float(self.attribute(node, "value", 0)) == 0  # as before opset 11

    def origin(self, name: str, over: frozenset[str] = MOVING) -> str:
        """Return what a value was called before it was moved."""
        known, path = self._origins.setdefault(over, {}), list[str]()
        while name not in known:
            known[name] = name  # which also ends a search in a circle
            path.append(name)
            node = self.makers.get(name)
            if name in self.initializers or node is None or not self.moves(node, over):
                break
            name = node.input[0]
        known.update(dict.fromkeys(path, known[name]))
        return known[name]

    def way_back(self, name: str, over: frozenset[str] = MOVING) -> Iterator[str]:
        """Yield a value, and what it was moved from, up to its origin."""
        yield name
        for _ in self.nodes:  # as nothing is moved more often, but in a circle
            if name == self.origin(name, over):
                return
            name = self.makers[name].input[0]
            yield name

    def source(self, name: str, over: frozenset[str] = MOVING) -> onnx.NodeProto | None:
        """Return the node that made a value before it was moved."""
        return self.makers.get(self.origin(name, over))

    def dequantizer(self, name: str) -> onnx.NodeProto | None:
        """Return the node by which a value was made of integers, before it was moved."""
        node = self.source(name)
        return node if node is not None and node.op_type == DEQUANTIZE else None

    def sinks(self, name: str, over: frozenset[str] = MOVING) -> Iterator[onnx.NodeProto]:
        """Yield who reads a value, those that only move it being followed to who reads that."""
        waiting, seen = [name], {name}
        while waiting:
            name = waiting.pop()
            for node in self.readers.get(name, []):
                if node.input[0] == name and self.moves(node, over):
                    waiting += [result for result in node.output if result and result not in seen]
                    seen.update(node.output)
                else:
                    yield node

    def inverses(self, integers: str) -> list[onnx.NodeProto]:
        """Return the dequantizers of integers."""
        readers = self.readers.get(integers, [])
        return [node for node in readers if node.op_type == DEQUANTIZE and node.domain in READ]

    def behind_pairs(self, integers: str) -> list[onnx.NodeProto]:
        """Return who reads integers, behind their dequantizers."""
        return [reader for node in self.inverses(integers) for reader in self.sinks(node.output[0])]

    def attribute(self, node: onnx.NodeProto, name: str, default: Any) -> Any:
        """Return an attribute of a node."""
        found = next((a for a in node.attribute if a.name == name), None)
        return default if found is None else onnx.helper.get_attribute_value(found)

    def axis(self, node: onnx.NodeProto, rank: int) -> int:
        """Return along which side of a tensor of some rank a quantizer or dequantizer has its scales."""
        axis = int(self.attribute(node, "axis", 1))
        return axis + rank if axis < 0 else axis

    def block(self, node: onnx.NodeProto) -> int:
        """Return how many elements in a row share a scale of a quantizer or dequantizer; 0 where all of a side do.

        TensorRT's own need not state it, as the shape of the scales says it.
        """
        stated = int(self.attribute(node, "block_size", 0))
        sides, scales = self.shape(node.input[0]), self.shape(node.input[1])
        if stated or node.domain in ONNX_DOMAINS or not sides or not scales or len(sides) != len(scales):
            return stated
        return next((side // count for side, count in zip(sides, scales, strict=True) if side > count > 0), 0)

    def integer_type(self, node: onnx.NodeProto) -> int:
        """Return the type of the integers of a quantizer or dequantizer: uint8 where it says nothing."""
        if told := int(self.attribute(node, INTEGERS, 0)):
            return told
        if len(node.input) > 2 and node.input[2]:
            return self.types.get(node.input[2], 0)
        if node.op_type == DEQUANTIZE:
            return self.types.get(node.input[0], 0)
        return int(self.attribute(node, "output_dtype", 0)) or onnx.TensorProto.UINT8

    @cached_property
    def everywhere(self) -> Sequence[onnx.NodeProto]:
        """The nodes of the graph and of all graphs within."""
        return [node for graph in graphs_of(self.graph) for node in graph.node]

    def of_kind(self, *kinds: str) -> Sequence[onnx.NodeProto]:
        """Return the nodes of some operators."""
        return [node for node in self.nodes if node.op_type in kinds]


def _typed(graph: onnx.GraphProto) -> Iterator[Any]:
    return iter((*graph.input, *graph.value_info, *graph.output))


def _inner(graph: onnx.GraphProto) -> Iterator[tuple[onnx.NodeProto, str, onnx.GraphProto]]:
    """Yield the graphs that the nodes of a graph have as attributes."""
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.type == onnx.AttributeProto.GRAPH:
                yield node, attribute.name, attribute.g
