"""Emit a graph as an ONNX model: inputs and outputs are named as in the signature, each operator lowers its nodes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import onnx_ir as ir
import torch
from onnx_ir import tensor_adapters

from clika_ref.core.errors import ClikaError, PluginError, TargetError, format_count
from clika_ref.core.ir import Graph, Node, Value, list_read_constants, walk
from clika_ref.core.symbols import Symbol, SymbolSource, is_symbolic, make_symbol
from clika_ref.core.types import TensorType
from clika_ref.onnx_export.builder import OPSET, NewerOpsetError, OnnxBuilder
from clika_ref.onnx_export.dtypes import to_onnx
from clika_ref.onnx_export.weight_layouts import fold_layouts

IR_VERSION = 10
"""ONNX file format version; every supported runtime reads 10, and it allows opset 21 for INT4."""

PRODUCER_NAME = "clika-ref"
"""The producer name stored in a file."""

SCOPE_KEY = "clika.scope"
SOURCE_KEY = "clika.source"
GUARDS_KEY = "clika.guards"
"""Metadata keys: the module path and source line of a node, and the guards of a model, one per line."""

OPERATOR_KEY = "clika.operator"
"""Key in ``ir.Node.meta``, which no file has: the name of the operator that the node is a lowering of."""


def emit(graph: Graph) -> ir.Model:
    """Lower a graph to an ONNX model; its values keep their names.

    Raises:
        TargetError: nodes have no lowering; the message lists all of them.
        PluginError: a lowering is broken.
    """
    check_lowerable(graph)
    opset = OPSET
    while True:
        try:
            return _Emission(graph, opset).model()
        except NewerOpsetError as needed:  # the opset increases in each round
            opset = needed.opset


def emit_node(node: Node) -> ir.Model:
    """Lower one node to a separate model, with one input for each operand.

    A further input has one dim for each symbol of the node, and its sizes provide their values.

    Raises:
        TargetError: the node has no lowering, or cannot be written.
        PluginError: the lowering is broken.
    """
    graph = Graph(node.op.name)
    sizes = graph.add_input(TensorType(torch.int64, tuple(map(make_symbol, sorted(_symbols_of(node))))), "sizes")
    for dim, symbol in enumerate(map(str, sizes.type.shape)):
        graph.symbols[symbol] = Symbol(symbol, 0, None, SymbolSource(sizes.name, dim))
    operands = {v: graph.add_input(v.type, "operand") for v in node.inputs if isinstance(v, Value)}
    inner = {v: graph.add_constant(v.data, v.name, v.type) for body in node.bodies for v in list_read_constants(body)}
    twin = graph.insert_copy(node, inner | operands)
    for value in twin.outputs:
        graph.add_output(value)
    return emit(graph)


def _symbols_of(node: Node) -> set[str]:
    types = [v.type.shape for v in (*node.inputs, *node.outputs) if isinstance(v, Value)]
    return symbols_in((*types, *node.inputs, *node.attrs.values()))


def symbols_in(item: Any) -> set[str]:
    """Return the names of symbols in a size or number, or in a tuple of them."""
    if isinstance(item, tuple):
        return {name for part in item for name in symbols_in(part)}
    return set(map(str, item.free_symbols)) if is_symbolic(item) else set()


def check_lowerable(graph: Graph) -> None:
    """Check that every node has an ONNX lowering.

    Raises:
        TargetError: nodes have none; the message lists all of them.
    """
    missing = [node for node in walk(graph) if node.op.lowering is None]
    if missing:
        shown = "\n".join(f"  {node.op.name} in {node.origin}" for node in missing)
        raise TargetError(
            f"cannot export {format_count(len(missing), 'node')} to ONNX:\n{shown}\n"
            "Declare their lowering with @<operator>.onnx."
        )


class EmittedBody:
    """A body of control flow, as a lowering gets it: a call emits its nodes at the current place."""

    def __init__(self, emission: _Emission, body: Graph) -> None:
        self._emission = emission
        self._body = body
        self.input_types = tuple(value.type for value in body.inputs)
        self.output_types = tuple(value.type for value in body.outputs)

    def __call__(self, *operands: Any) -> tuple[ir.Value, ...]:
        """Return the results for operands: ONNX values, or numbers and size expressions."""
        return self._emission.emit_body(self._body, operands)


class _Emission:
    def __init__(self, graph: Graph, opset: int) -> None:
        self.graph = graph
        self.op = OnnxBuilder(opset)
        self.values: dict[Value, ir.Value] = {}
        self.symbols: dict[str, list[Symbol]] = {}
        self.copies: Counter[str] = Counter()
        """How often each value of a body was emitted: the condition of a loop is, before the loop and in it."""
        for symbol in graph.symbols.values():
            self.symbols.setdefault(symbol.source.name, []).append(symbol)

    def model(self) -> ir.Model:
        inputs = [self._declare(value) for value in self.graph.inputs]
        for value in self.graph.constants.values():
            if value.uses:
                self._constant(value)
        for value in self.graph.inputs:
            self._bind(value)
        for node in self.graph.nodes:
            self._lower(node)
        outputs = self._outputs()
        self._move_quantized_weights()
        self.op.nodes = fold_layouts(self.op.nodes, self.op.initializers, outputs)
        onnx_graph = ir.Graph(
            inputs,
            outputs,
            nodes=self.op.nodes,
            initializers=[v for v in self.op.initializers.values() if v.uses() or v.is_graph_output()],
            name=self.graph.name,
            opset_imports={"": self.op.opset, **{d: 1 for d in sorted(self.op.domains) if d}},
        )
        guards = {GUARDS_KEY: "\n".join(map(str, self.graph.guards))} if self.graph.guards else {}
        return ir.Model(onnx_graph, ir_version=IR_VERSION, producer_name=PRODUCER_NAME, metadata_props=guards)

    def _declare(self, value: Value) -> ir.Value:
        onnx = ir.Value(name=value.name)
        self.op.annotate(onnx, value.type)
        self.values[value] = onnx
        return onnx

    def _constant(self, value: Value) -> None:
        onnx = self._declare(value)
        assert onnx.shape is not None
        if value.deferred_data is not None:  # computed during writing, one weight at a time
            onnx.const_value = ir.LazyTensor(
                lambda: _make_tensor(value), dtype=to_onnx(value.type.dtype), shape=onnx.shape, name=value.name
            )
        else:
            onnx.const_value = _make_tensor(value)
        self.op.initializers[value.name] = onnx

    def _bind(self, value: Value) -> None:
        for symbol in self.symbols.get(value.name, ()):
            self.op.sizes.bind(symbol, self.values[value])

    def _lower(self, node: Node) -> None:
        op = self.op
        op.prefix = node.name
        op.results = tuple(v.type for v in node.outputs)
        op.metadata = {k: v for k, v in ((SCOPE_KEY, node.origin.scope), (SOURCE_KEY, node.origin.line)) if v}
        operands = [self.values[v] if isinstance(v, Value) else v for v in node.inputs]
        first_new = len(op.nodes)
        results = self._call(node, operands)
        for onnx_node in op.nodes[first_new:]:
            onnx_node.meta[OPERATOR_KEY] = node.op.name
        new = {value for onnx_node in op.nodes[first_new:] for value in onnx_node.outputs}
        for value, onnx in zip(node.outputs, results, strict=True):
            if onnx in new:
                onnx.name = self._free_name(value)
                new.discard(onnx)
                self.op.annotate(onnx, value.type)
            self.values[value] = onnx
            self._bind(value)
        op.metadata = {}

    def _move_quantized_weights(self) -> None:
        """Store the constants that subgraphs dequantize in these: ONNX Runtime looks for them there only."""
        for top in self.op.nodes:
            for part in top.attributes.values():
                if part.type != ir.AttributeType.GRAPH:
                    continue
                for node in ir.traversal.RecursiveGraphIterator(part.as_graph()):
                    if node.op_type == "DequantizeLinear":
                        self._move_constants(node)

    def _move_constants(self, node: ir.Node) -> None:
        owner = node.graph
        assert isinstance(owner, ir.Graph)
        for position, value in enumerate(node.inputs):
            if value is None or value.name not in self.op.initializers:
                continue
            if all(use.node.graph is owner for use in value.uses()):
                del self.op.initializers[value.name]
                owner.register_initializer(value)
                continue
            name = f"{owner.name}/{value.name}"
            if name not in owner.initializers:
                copy = ir.Value(name=name, shape=value.shape, type=value.type, const_value=value.const_value)
                owner.register_initializer(copy)
            node.replace_input_with(position, owner.initializers[name])

    def _free_name(self, value: Value) -> str:
        self.copies[value.name] += 1
        return value.name if self.copies[value.name] == 1 else f"{value.name}/{self.copies[value.name]}"

    def emit_body(self, body: Graph, operands: Sequence[Any]) -> tuple[ir.Value, ...]:
        """Emit the nodes of a body at the current place, with these operands; return its results."""
        op = self.op
        outer = op.prefix, op.results, op.metadata
        inner = [symbol for symbol in body.symbols.values() if not op.sizes.has_source(symbol)]
        for symbol in inner:
            self.symbols.setdefault(symbol.source.name, []).append(symbol)
        for value, operand in zip(body.inputs, operands, strict=True):
            if isinstance(operand, ir.Value) or value.use_count or self.symbols.get(value.name):
                self.values[value] = op.like_scalar(operand, value.type.dtype)
                self._bind(value)
        for node in body.nodes:
            self._lower(node)
        op.prefix, op.results, op.metadata = outer
        for symbol in inner:
            self.symbols[symbol.source.name].remove(symbol)
        return tuple(self.values[value] for value in body.outputs)

    def _call(self, node: Node, operands: list[Any]) -> tuple[ir.Value, ...]:
        assert node.op.lowering is not None
        bodies = {name: EmittedBody(self, body) for name, body in zip(node.op.bodies, node.bodies, strict=True)}
        try:
            result = node.op.lowering(self.op, *operands, **node.attrs, **bodies)
        except NewerOpsetError:
            raise
        except ClikaError as error:
            error.add_note(f"while lowering {node!r}")
            raise
        except Exception as error:
            raise PluginError(f"the ONNX lowering of {node.op.name} failed on {node!r}: {error!r}") from error
        results = result if isinstance(result, tuple) else (result,)
        odd = [result for result in results if not isinstance(result, ir.Value)]
        if odd or len(results) != len(node.outputs):
            expected = f"{format_count(len(node.outputs), 'result')} of `op` for {node!r}"
            found = f"{odd[0]!r}" if odd else format_count(len(results), "value")
            raise PluginError(f"the ONNX lowering of {node.op.name} returned {found}. It must return {expected}.")
        return results

    def _outputs(self) -> list[ir.Value]:
        """Return the outputs under their names; an Identity renames an output that a lowering returned unchanged."""
        outputs: list[ir.Value] = []
        for value in self.graph.outputs:
            onnx = self.values[value]
            if onnx.name != value.name:
                self.op.prefix = value.name
                onnx = self.op.Identity(onnx)
                onnx.name = value.name
                self.op.annotate(onnx, value.type)
            outputs.append(onnx)
        return outputs


def _make_tensor(value: Value) -> tensor_adapters.TorchTensor:
    data = value.data
    assert data is not None
    return tensor_adapters.TorchTensor(data.detach().contiguous().cpu(), name=value.name)
