"""Emit a graph as an ONNX model: inputs and outputs are named as in the signature, each operator lowers its nodes."""

from __future__ import annotations

import functools
from typing import Any

import onnx_ir as ir
import torch
from onnx_ir import tensor_adapters

from clika_ref.core.errors import ClikaError, PluginError, TargetError, format_count
from clika_ref.core.ir import Graph, Node, Value
from clika_ref.core.symbols import Symbol, SymbolSource, is_symbolic, make_symbol
from clika_ref.core.types import TensorType
from clika_ref.onnx_export.builder import OPSET, NewerOpsetError, OnnxBuilder
from clika_ref.onnx_export.dtypes import to_onnx

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
    inputs = [operands[v] if isinstance(v, Value) else v for v in node.inputs]
    twin = graph.insert(Node(node.op, inputs, node.attrs, node.origin), [v.type for v in node.outputs])
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
    missing = [node for node in graph.nodes if node.op.lowering is None]
    if missing:
        shown = "\n".join(f"  {node.op.name} in {node.origin}" for node in missing)
        raise TargetError(
            f"cannot export {format_count(len(missing), 'node')} to ONNX:\n{shown}\n"
            "Declare their lowering with @<operator>.onnx."
        )


class _Emission:
    def __init__(self, graph: Graph, opset: int) -> None:
        self.graph = graph
        self.op = OnnxBuilder(opset)
        self.values: dict[Value, ir.Value] = {}
        self.symbols: dict[str, list[Symbol]] = {}
        self.format_size = functools.cache(str)  # sympy takes milliseconds to print the sizes after strided layers
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
        self._annotate(onnx, value.type)
        self.values[value] = onnx
        return onnx

    def _annotate(self, onnx: ir.Value, type: TensorType) -> None:
        onnx.type = ir.TensorType(to_onnx(type.dtype))
        onnx.shape = ir.Shape([d if isinstance(d, int) else self.format_size(d) for d in type.shape])
        self.op.declare(onnx, type)

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
                onnx.name = value.name
                new.discard(onnx)
                self._annotate(onnx, value.type)
            self.values[value] = onnx
            self._bind(value)
        op.metadata = {}

    def _call(self, node: Node, operands: list[Any]) -> tuple[ir.Value, ...]:
        assert node.op.lowering is not None
        try:
            result = node.op.lowering(self.op, *operands, **node.attrs)
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
                self._annotate(onnx, value.type)
            outputs.append(onnx)
        return outputs


def _make_tensor(value: Value) -> tensor_adapters.TorchTensor:
    data = value.data
    assert data is not None
    return tensor_adapters.TorchTensor(data.detach().contiguous().cpu(), name=value.name)
