"""Graphs as JSON. Reading executes no code; tensors are stored elsewhere by name."""

from __future__ import annotations

import enum
import json
import math
from collections.abc import Callable, Mapping
from typing import Any

import sympy
import torch

from clika_ref.core.errors import ModelError
from clika_ref.core.ir import Graph, Node, Value
from clika_ref.core.operators import Operator
from clika_ref.core.symbols import SYMPY_TO_PYTHON, Guard, Symbol, SymbolSource, make_symbol
from clika_ref.core.types import Origin, TensorType
from clika_ref.serialization.class_lookup import decode_member, encode_member
from clika_ref.serialization.container import check_format
from clika_ref.serialization.vocabulary import AttributeForm, ExpressionHead, GraphKey

GRAPH_VERSION = 2
"""Version of the graph document. Version 1 was that of development versions, and is rejected."""

EXPRESSION_FUNCTIONS: dict[str, type] = {
    kind.__name__: kind for kind in SYMPY_TO_PYTHON if kind.__module__.startswith("sympy")
} | {f"torch.{kind.__name__}": kind for kind in SYMPY_TO_PYTHON if kind.__module__.startswith("torch")}
"""Functions allowed in expressions of a file; all others are rejected."""

MAX_EXPONENT = 64
"""Maximum exponent of a size in an expression, since a forged file may contain any."""

_FUNCTION_NAMES = {kind: name for name, kind in EXPRESSION_FUNCTIONS.items()}

DTYPES_BY_NAME = {str(d).removeprefix("torch."): d for d in vars(torch).values() if isinstance(d, torch.dtype)}


def encode(item: Any) -> Any:
    """Return an attribute as JSON; types that JSON lacks become objects with one entry.

    Raises:
        ModelError: the type cannot be serialized.
    """
    if isinstance(item, enum.Enum):  # first: an enum may also be an int or a string
        return {AttributeForm.ENUM: encode_member(item)}
    if item is None or isinstance(item, bool | str):
        return item
    if isinstance(item, int):
        return int(item)
    if isinstance(item, float):
        return item if math.isfinite(item) else {AttributeForm.FLOAT: repr(item)}
    if isinstance(item, complex):
        return {AttributeForm.COMPLEX: [encode(item.real), encode(item.imag)]}
    if isinstance(item, tuple | list):
        return {AttributeForm.TUPLE if isinstance(item, tuple) else AttributeForm.LIST: [encode(i) for i in item]}
    if isinstance(item, torch.dtype):
        return {AttributeForm.DTYPE: str(item).removeprefix("torch.")}
    if isinstance(item, torch.device):
        return {AttributeForm.DEVICE: str(item)}
    if isinstance(item, sympy.Basic):
        return {AttributeForm.EXPRESSION: _encode_expression(item)}
    if isinstance(item, dict) and all(isinstance(k, str) for k in item):
        return {AttributeForm.DICT: {k: encode(v) for k, v in item.items()}}
    raise ModelError(
        f"cannot save {item!r}, a {type(item).__name__}. Pass a number, a string, a dtype or a tensor instead."
    )


def decode(item: Any) -> Any:
    """Decode the result of `encode`.

    Raises:
        ModelError: the form is unknown.
    """
    if not isinstance(item, dict):
        return item
    if len(item) == 1:
        ((kind, content),) = item.items()
        if kind in _DECODERS:
            return _DECODERS[kind](content)
    raise ModelError(
        f"cannot load {item!r} in a saved graph: its form is unknown. The graph is damaged, or was saved by a newer "
        "version."
    )


def _encode_expression(expr: sympy.Basic) -> Any:
    if isinstance(expr, sympy.Symbol):
        return expr.name if expr.is_nonnegative else [ExpressionHead.NUMBER, expr.name]
    if isinstance(expr, sympy.Integer):
        return int(expr)
    if isinstance(expr, sympy.Rational):
        return [ExpressionHead.FRACTION, int(expr.p), int(expr.q)]
    if expr in (sympy.true, sympy.false):
        return [ExpressionHead.BOOL, expr is sympy.true]
    if isinstance(expr, sympy.Float):
        return [ExpressionHead.FLOAT, repr(float(expr))]
    kind = next((k for k in type(expr).__mro__ if k in _FUNCTION_NAMES), None)
    if kind is None:
        raise ModelError(f"cannot save the size expression {expr}: {type(expr).__name__} is not supported")
    return [_FUNCTION_NAMES[kind], *map(_encode_expression, expr.args)]


def _decode_expression(item: Any) -> sympy.Basic:
    if isinstance(item, str):
        return make_symbol(item)
    if isinstance(item, int):
        return sympy.Integer(item)
    head, *arguments = item
    if head == ExpressionHead.NUMBER:
        return make_symbol(arguments[0], is_length=False)
    if head == ExpressionHead.FRACTION:
        return sympy.Rational(int(arguments[0]), int(arguments[1]))
    if head == ExpressionHead.BOOL:
        return sympy.true if arguments[0] else sympy.false
    if head == ExpressionHead.FLOAT:
        return sympy.Float(float(arguments[0]))
    if head not in EXPRESSION_FUNCTIONS:
        raise ModelError(
            f"cannot load a saved size expression: the function {head!r} is not one of "
            f"{', '.join(sorted(EXPRESSION_FUNCTIONS))}"
        )
    operands = [_decode_expression(argument) for argument in arguments]
    if EXPRESSION_FUNCTIONS[head] is sympy.Pow:
        _check_power(*operands)
    return EXPRESSION_FUNCTIONS[head](*operands)


def _check_power(base: sympy.Basic, exponent: sympy.Basic) -> None:
    """Reject powers of numbers, which are saved as their value, and high powers of sizes: both may take forever."""
    limit = 1 if base.is_number else MAX_EXPONENT
    if exponent.is_number and abs(exponent) > limit:  # type: ignore[arg-type, operator]
        raise ModelError(f"cannot load a saved size expression: the power {exponent} of {base} is not supported")


def _decode_dtype(name: str) -> torch.dtype:
    if name not in DTYPES_BY_NAME:
        raise ModelError(f"cannot load a saved graph: this PyTorch has no dtype {name!r}")
    return DTYPES_BY_NAME[name]


_DECODERS: dict[str, Callable[[Any], Any]] = {
    AttributeForm.FLOAT: float,
    AttributeForm.COMPLEX: lambda parts: complex(*map(decode, parts)),
    AttributeForm.TUPLE: lambda items: tuple(map(decode, items)),
    AttributeForm.LIST: lambda items: list(map(decode, items)),
    AttributeForm.DICT: lambda items: {k: decode(v) for k, v in items.items()},
    AttributeForm.DTYPE: _decode_dtype,
    AttributeForm.DEVICE: torch.device,
    AttributeForm.EXPRESSION: _decode_expression,
    AttributeForm.ENUM: decode_member,
}


def graph_to_json(graph: Graph) -> dict[str, Any]:
    """Return a graph as JSON without its tensors, which are stored under the names of its constants."""
    return {
        GraphKey.VERSION: GRAPH_VERSION,
        GraphKey.NAME: graph.name,
        GraphKey.INPUTS: [[v.name, _encode_type(v.type)] for v in graph.inputs],
        GraphKey.CONSTANTS: list(graph.constants),
        GraphKey.CONSTANT_TYPES: [_encode_type(v.type) for v in graph.constants.values()],
        GraphKey.ALIASES: graph.aliases,
        GraphKey.SYMBOLS: [_encode_symbol(s) for s in graph.symbols.values()],
        GraphKey.GUARDS: [[_encode_expression(g.relation), g.line] for g in graph.guards],
        GraphKey.NODES: [_encode_node(n) for n in graph.nodes],
        GraphKey.OUTPUTS: [v.name for v in graph.outputs],
        GraphKey.STATE: {name: v.name for name, v in graph.state.items()},
    }


def is_same_graph(document: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether two serialized graphs compute the same; origins of nodes are ignored."""

    def comparable_parts(graph: Mapping[str, Any]) -> list[Any]:
        return [
            [_without_origin(node) for node in graph[GraphKey.NODES]],
            graph[GraphKey.INPUTS],
            graph[GraphKey.OUTPUTS],
            graph[GraphKey.STATE],
        ]

    return comparable_parts(document) == json.loads(json.dumps(comparable_parts(other)))


def _without_origin(node: list[Any]) -> list[Any]:
    inner = [{**body, GraphKey.NODES: [_without_origin(n) for n in body[GraphKey.NODES]]} for body in _bodies_of(node)]
    return [*node[:4], *inner]


def _encode_type(type: TensorType) -> list[Any]:
    return [str(type.dtype).removeprefix("torch."), [encode(d) for d in type.shape]]


def _encode_node(node: Node) -> list[Any]:
    inputs = [{AttributeForm.VALUE: v.name} if isinstance(v, Value) else encode(v) for v in node.inputs]
    outputs = [[v.name, _encode_type(v.type)] for v in node.outputs]
    origin = [list(node.origin.scopes), list(node.origin.lines), list(node.origin.history)]
    bodies = [[_encode_body(body) for body in node.bodies]] if node.bodies else []
    return [node.op.name, inputs, {k: encode(v) for k, v in node.attrs.items()}, outputs, origin, *bodies]


def _encode_body(body: Graph) -> dict[str, Any]:
    """Return a body; its constants are those of the graph."""
    return {
        GraphKey.NAME: body.name,
        GraphKey.INPUTS: [[v.name, _encode_type(v.type)] for v in body.inputs],
        GraphKey.SYMBOLS: [_encode_symbol(s) for s in body.symbols.values()],
        GraphKey.NODES: [_encode_node(n) for n in body.nodes],
        GraphKey.OUTPUTS: [v.name for v in body.outputs],
    }


def _encode_symbol(symbol: Symbol) -> list[Any]:
    source = symbol.source
    kind = [True] if source.holds_length else []
    return [symbol.name, symbol.low, symbol.high, source.name, source.dim, symbol.example, *kind]


def graph_from_json(
    document: Mapping[str, Any],
    find: Callable[[str], Operator | None],
    tensors: Mapping[str, torch.Tensor] | None = None,
) -> Graph:
    """Rebuild a graph with given tensors, or without any; ``find`` returns an operator by name.

    Raises:
        ModelError: the graph is of another version, uses an operator that no plugin declares or attributes that the
            operator lacks, or a tensor is missing.
    """
    check_format("the saved graph", document[GraphKey.VERSION], GRAPH_VERSION)
    operators = {name: find(name) for name in _list_operators(document)}
    missing = sorted(name for name, op in operators.items() if op is None)
    if missing:
        raise ModelError(
            f"cannot load the saved graph: no installed plugin declares the operators {missing}. Install one that does."
        )
    graph = Graph(document[GraphKey.NAME])
    graph.aliases = dict(document[GraphKey.ALIASES])
    values: dict[str, Value] = {}
    for name, kind in document[GraphKey.INPUTS]:
        values[name] = graph.add_input(read_type(kind), name)
    for name, kind in zip(document[GraphKey.CONSTANTS], document[GraphKey.CONSTANT_TYPES], strict=True):
        # The traced type: a weight that was cast later is then rejected here as in the module itself.
        tensor = None if tensors is None else tensors[name]
        values[name] = graph.add_constant(tensor, name, read_type(kind))
        if tensor is not None:
            _check_shape(values[name], tensor)
    graph.symbols = _read_symbols(document)
    graph.guards = [Guard(_decode_expression(relation), line) for relation, line in document[GraphKey.GUARDS]]  # type: ignore[arg-type]
    _read_nodes(graph, values, document, operators)
    for name, source in document[GraphKey.STATE].items():
        graph.set_state(name, values[source])
    return graph


def _check_shape(weight: Value, found: torch.Tensor) -> None:
    if weight.type.shape != tuple(found.shape):
        given = TensorType(found.dtype, tuple(found.shape))
        raise ModelError(f"the weight %{weight.name}: {given} does not match {weight.type} of the saved graph")


def read_type(kind: list[Any]) -> TensorType:
    """Return the type of a value.

    Raises:
        ModelError: this PyTorch lacks the dtype.
    """
    return TensorType(_decode_dtype(kind[0]), tuple(decode(d) for d in kind[1]))


def _list_operators(document: Mapping[str, Any]) -> set[str]:
    """Return the names of the operators of a graph and of its bodies."""
    entries = document[GraphKey.NODES]
    inner = (_list_operators(body) for entry in entries for body in _bodies_of(entry))
    return {entry[0] for entry in entries}.union(*inner)


def _bodies_of(entry: list[Any]) -> list[Any]:
    return entry[5] if len(entry) > 5 else []


def _read_symbols(document: Mapping[str, Any]) -> dict[str, Symbol]:
    symbols: dict[str, Symbol] = {}
    for name, low, high, source, dim, example, *kind in document[GraphKey.SYMBOLS]:
        symbols[name] = Symbol(name, low, high, SymbolSource(source, dim, *kind), example)
    return symbols


def _read_nodes(
    graph: Graph, values: dict[str, Value], document: Mapping[str, Any], operators: Mapping[str, Operator | None]
) -> None:
    for entry in document[GraphKey.NODES]:
        _read_node(graph, values, entry, operators)
    for name in document[GraphKey.OUTPUTS]:
        graph.add_output(values[name])


def _read_body(graph: Graph, document: Mapping[str, Any], operators: Mapping[str, Operator | None]) -> Graph:
    body = graph.new_body(document[GraphKey.NAME])
    inputs = {name: body.add_input(read_type(kind), name) for name, kind in document[GraphKey.INPUTS]}
    body.symbols = _read_symbols(document)
    _read_nodes(body, {**graph.constants, **inputs}, document, operators)
    return body


def _read_node(
    graph: Graph, values: dict[str, Value], entry: list[Any], operators: Mapping[str, Operator | None]
) -> None:
    _, inputs, attrs, outputs, (scopes, lines, history), *_ = entry
    op = operators[entry[0]]
    operands = [
        values[i[AttributeForm.VALUE]] if isinstance(i, dict) and AttributeForm.VALUE in i else decode(i)
        for i in inputs
    ]
    origin = Origin(tuple(scopes), tuple(lines), tuple(history))
    assert op is not None
    if attrs.keys() != op.attributes.keys():
        raise ModelError(
            f"the saved graph calls {op.name} with the attributes {sorted(attrs)}, but the operator has "
            f"{sorted(op.attributes)}. It was saved with another version of the plugin, or is damaged."
        )
    documents = _bodies_of(entry)
    if len(documents) != len(op.bodies):
        raise ModelError(
            f"the saved graph calls {op.name} with {len(documents)} bodies, but the operator has {len(op.bodies)}. It "
            "was saved with another version of the plugin, or is damaged."
        )
    bodies = [_read_body(graph, document, operators) for document in documents]
    node = Node(op, operands, {k: decode(v) for k, v in attrs.items()}, origin, bodies)
    graph.insert(node, [read_type(kind) for _, kind in outputs], names=[label for label, _ in outputs])
    values.update((value.name, value) for value in node.outputs)
