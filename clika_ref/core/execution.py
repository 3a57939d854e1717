"""Run a graph: the interpreter, which defines the semantics of a graph, and the fast form, a ``torch.fx`` graph."""

# pyright: reportPrivateUsage=false, reportMissingTypeStubs=false, reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# This file reads private links of the IR; sympy has no type annotations.

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any

import sympy
import torch
from torch import fx

from clika_ref.core.errors import ClikaError
from clika_ref.core.ir import Graph, Node, Value
from clika_ref.core.symbols import atom_to_number, expr_to_function, is_symbolic, resolve

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from clika_ref.core.symbols import Symbol


def read_sizes(graph: Graph, inputs: Sequence[torch.Tensor]) -> dict[str, int]:
    """Return the size of each symbol of a graph, read from ``inputs``: one tensor for each input, in order."""
    by_name = {value.name: tensor for value, tensor in zip(graph.inputs, inputs, strict=True)}
    return {s.name: _read_symbol(s, by_name[s.source.name]) for s in graph.symbols.values() if s.source.name in by_name}


def _read_symbol(symbol: Symbol, tensor: torch.Tensor) -> int:
    return int(tensor) if symbol.source.dim is None else tensor.shape[symbol.source.dim]


def interpret(
    graph: Graph, inputs: Sequence[torch.Tensor], hook: Callable[[Node, tuple[torch.Tensor, ...]], Any] | None = None
) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    """Compute a graph node by node; return its outputs and the new values of its state.

    Args:
        graph: the graph to run.
        inputs: one tensor for each input of the graph, in order.
        hook: called after each node with the node and its results. A truthy return value replaces the results.

    Raises:
        ClikaError: a node failed; the message names the node, its module and the user's line.
    """
    values: dict[Value, torch.Tensor] = dict(zip(graph.inputs, inputs, strict=True))
    values.update({v: v.data for v in graph.constants.values() if v.data is not None})
    sizes = read_sizes(graph, inputs)
    late: dict[str, list[Symbol]] = {}
    for symbol in graph.symbols.values():
        late.setdefault(symbol.source.name, []).append(symbol)
    device = next((t.device for t in values.values()), torch.device("cpu"))
    last_use = {v: node for node in graph.nodes for v in node.inputs if isinstance(v, Value)}
    for node in graph.nodes:
        results = _run_node(node, values, sizes, device)
        if hook is not None:
            results = hook(node, results) or results
        for value, result in zip(node.outputs, results, strict=True):
            values[value] = result
            sizes.update({s.name: _read_symbol(s, result) for s in late.get(value.name, ())})
        for value in node.inputs:
            if isinstance(value, Value) and last_use[value] is node and _is_intermediate(graph, value):
                values.pop(value, None)
    return [values[v] for v in graph.outputs], {name: values[v] for name, v in graph.state.items()}


def _is_intermediate(graph: Graph, value: Value) -> bool:
    return value.producer is not None and all(use.user is not graph for use in value.uses)


def _run_node(
    node: Node, values: dict[Value, torch.Tensor], sizes: dict[str, int], device: torch.device
) -> tuple[torch.Tensor, ...]:
    operands = [values[v] if isinstance(v, Value) else resolve(v, sizes) for v in node.inputs]
    attrs = {name: resolve(v, sizes) for name, v in node.attrs.items()}
    if node.op.takes_device and attrs["device"] is None:
        attrs["device"] = device
    try:
        result = node.op(*operands, **attrs)
    except Exception as error:
        raise ClikaError(f"{node!r} in {node.origin}: execution failed: {error}") from error
    return (result,) if isinstance(result, torch.Tensor) else tuple(result)


def to_fx(graph: Graph) -> fx.Graph:
    """Return the fast form of a graph: an FX graph equivalent to the interpreter.

    It returns the outputs as a tuple and writes new state in place, like the original module. Inputs are named
    ``input_0``, ... and constants are attributes ``constant_0``, ...: FX pastes names into the source it generates, and
    a graph loaded from a file may contain arbitrary names.
    """
    return _FxWriter(graph).write()


def snapshot_state(state: torch.Tensor, is_shared: bool) -> torch.Tensor:  # noqa: FBT001 - FX passes it by position
    """Return the old value of ``state``, of any shape, that the call overwrites later.

    It is a copy if ``is_shared``, or if gradients are recorded: autograd cannot go backward through a tensor that was
    overwritten. In inference, caches are not copied.
    """
    return state.clone() if is_shared or torch.is_grad_enabled() else state


def _find_base(value: Value) -> Value:
    """Follow views, and copies of views, to the value that owns the memory."""
    while value.producer is not None and value.producer.op.write_back_rule is not None:
        value = value.producer.first_tensor
    return value


class _FxWriter:
    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.fx = fx.Graph()
        self.nodes: dict[Value, fx.Node] = {}
        self.constants = {value: f"constant_{i}" for i, value in enumerate(graph.constants.values())}
        self.sizes: dict[sympy.Basic, Any] = {}
        self.device: fx.Node | None = None
        self.symbols_by_source: dict[str, list[Symbol]] = {}

    def write(self) -> fx.Graph:
        for i, value in enumerate(self.graph.inputs):
            self.nodes[value] = self.fx.placeholder(f"input_{i}")
        for symbol in self.graph.symbols.values():
            self.symbols_by_source.setdefault(symbol.source.name, []).append(symbol)
        for value in self.graph.inputs:
            self._bind(value)
        by_name = {v.name: v for v in (*self.graph.inputs, *self.graph.constants.values())}
        shared = set(map(_find_base, (*self.graph.outputs, *self.graph.state.values())))
        state_nodes = [
            self._state_destination(by_name[name], is_shared=by_name[name] in shared) for name in self.graph.state
        ]
        for node in self.graph.nodes:
            self._call(node)
        for destination, value in zip(state_nodes, self.graph.state.values(), strict=True):
            self.fx.call_method("copy_", (destination, self._value(value)))
        self.fx.output(tuple(map(self._value, self.graph.outputs)))
        return self.fx

    def _state_destination(self, value: Value, *, is_shared: bool) -> fx.Node:
        """Return the node that new state is written to at the end; until then, reads use `snapshot_state`."""
        destination = self._value(value)
        self.nodes[value] = self.fx.call_function(snapshot_state, (destination, is_shared))
        if isinstance(value.data, torch.nn.Parameter):  # autograd rejects in-place writes to a leaf
            destination = self.fx.call_method("detach", (destination,))
        return destination

    def _value(self, value: Value) -> fx.Node:
        if value not in self.nodes:  # a constant, fetched at its first use
            self.nodes[value] = self.fx.get_attr(self.constants[value])
        return self.nodes[value]

    def _bind(self, value: Value) -> None:
        for symbol in self.symbols_by_source.get(value.name, ()):
            if symbol.source.dim is None:
                size = self.fx.call_method("item", (self.nodes[value],))
            else:
                size = self.fx.call_method("size", (self.nodes[value], symbol.source.dim))
            self.sizes[symbol.expr] = size

    def _call(self, node: Node) -> None:
        operands = tuple(self._argument(v) for v in node.inputs)
        attrs = {name: self._argument(v) for name, v in node.attrs.items()}
        if node.op.takes_device and attrs["device"] is None:
            attrs["device"] = self._device()
        call = self.fx.call_function(node.op, operands, attrs)
        for value in node.outputs:
            if not node.op.returns_tuple:
                self.nodes[value] = call
            elif value.use_count or value.name in self.symbols_by_source:
                self.nodes[value] = self.fx.call_function(operator.getitem, (call, value.index))
            self._bind(value)

    def _device(self) -> fx.Node:
        if self.device is None:
            anchor = next(iter([*self.graph.inputs, *self.graph.constants.values()]))
            self.device = self.fx.call_function(getattr, (self._value(anchor), "device"))
        return self.device

    def _argument(self, item: Any) -> Any:
        if isinstance(item, Value):
            return self._value(item)
        if isinstance(item, tuple):
            return tuple(map(self._argument, item))
        if isinstance(item, complex):  # its source text would change inf, NaN and -0.0
            return self.fx.call_function(complex, (item.real, item.imag))
        return self._size(item) if is_symbolic(item) else item

    def _size(self, expr: sympy.Basic) -> Any:
        if not expr.args and expr not in self.sizes:
            return atom_to_number(expr)
        if expr not in self.sizes:
            self.sizes[expr] = self.fx.call_function(expr_to_function(expr), tuple(map(self._size, expr.args)))
        return self.sizes[expr]
