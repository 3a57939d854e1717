"""Unify two graphs of one model, traced at different lengths: numbers that differ become expressions of the length."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import sympy
import torch

from clika_ref.capture.messages import MismatchError
from clika_ref.capture.program import TracedGraph
from clika_ref.core.errors import format_count
from clika_ref.core.ir import Graph, Node, Value
from clika_ref.core.types import TensorType


@dataclass(frozen=True)
class LengthPair:
    """The two lengths of a dynamic dim, of the graph to change and of the other one, and the symbol of the dim."""

    symbol: sympy.Symbol
    first: int
    second: int

    @property
    def lengths(self) -> str:
        """The lengths, for messages."""
        return f"{self.first} and {self.second}"


def unify_lengths(result: TracedGraph, other: TracedGraph, pair: LengthPair, sizes: Mapping[sympy.Symbol, int]) -> None:
    """Make every number of a graph that differs in the other one a linear expression of the length.

    Args:
        result: the graph to change, with its signature.
        other: the graph of the same model, for the second length.
        pair: the lengths.
        sizes: the values in both traces of further symbols that ``result`` already has.

    Raises:
        MismatchError: the graphs differ in more than such numbers; the message names the call and its line.
    """
    unifier = _GraphUnifier(pair, sizes)
    unifier.run(result.graph, other.graph)
    outputs = zip(result.signature.outputs, other.signature.outputs, strict=True)
    made = tuple(replace(a, value=unifier.unify(a.value, b.value, "an output")) for a, b in outputs)
    result.signature = replace(result.signature, outputs=made)


@dataclass
class _GraphUnifier:
    pair: LengthPair
    sizes: Mapping[sympy.Symbol, int]
    twins: dict[Value, Value] = field(default_factory=dict[Value, Value])

    def run(self, graph: Graph, other: Graph) -> None:
        """Unify two graphs or bodies; values at the same positions correspond."""
        self._unify_values(graph.inputs, other.inputs, "the inputs")
        for node, twin in _zip_nodes(graph, other):
            where = f"{node.op_type} in {node.origin}"
            if twin is None or node.op is not twin.op or len(node.inputs) != len(twin.inputs):
                raise self._make_error(where, node.op_type, "no call" if twin is None else twin.op_type)
            for position, (a, b) in enumerate(zip(node.inputs, twin.inputs, strict=True)):
                graph_operand = self._unify_operand(a, b, where)
                if graph_operand is not a:
                    graph.set_input(node, position, graph_operand)
            node.attrs = {name: self.unify(item, twin.attrs[name], where) for name, item in node.attrs.items()}
            for body, twin_body in zip(node.bodies, twin.bodies, strict=True):
                self.run(body, twin_body)
            self._unify_values(node.outputs, twin.outputs, where)
        for a, b in zip(graph.outputs, other.outputs, strict=True):
            self._unify_operand(a, b, "the outputs")
        if graph.state.keys() != other.state.keys():
            raise self._make_error("the written buffers", sorted(graph.state), sorted(other.state))
        for name, value in graph.state.items():
            self._unify_operand(value, other.state[name], name)
        graph.mark_changed()

    def unify(self, a: Any, b: Any, where: str) -> Any:
        """Return a number, expression or attribute of both graphs."""
        if isinstance(a, tuple) and isinstance(b, tuple) and len(a) == len(b):
            return tuple(self.unify(x, y, where) for x, y in zip(a, b, strict=True))
        if type(a) is int and type(b) is int:
            return a if a == b else self._interpolate(a, b, where)
        if isinstance(a, sympy.Basic) and isinstance(b, sympy.Basic | int):
            return self._unify_expressions(a, sympy.Integer(b) if isinstance(b, int) else b, where)
        if type(a) is not type(b) or repr(a) != repr(b):  # also for NaN and -0.0
            raise self._make_error(where, a, b)
        return a

    def _interpolate(self, a: int, b: int, where: str) -> Any:
        slope, rest = divmod(b - a, self.pair.second - self.pair.first)
        if rest:
            raise self._make_error(where, a, b)
        return a + slope * (self.pair.symbol - self.pair.first)

    def _unify_expressions(self, a: sympy.Basic, b: sympy.Basic, where: str) -> Any:
        known = a.xreplace({symbol: sympy.Integer(size) for symbol, size in self.sizes.items()})
        if known == b:
            return a
        if known != a:  # it depends on another length already
            change = sympy.expand(b - known)  # pyright: ignore[reportOperatorIssue]
            return a + self._unify_expressions(sympy.S.Zero, change, where)  # pyright: ignore[reportOperatorIssue]
        if a.func is b.func and len(a.args) == len(b.args) and not isinstance(a, sympy.Add | sympy.Mul) and a.args:
            return a.func(*(self._unify_expressions(x, y, where) for x, y in zip(a.args, b.args, strict=True)))
        first, second = (sympy.expand(e).as_coefficients_dict() for e in (a, b))
        terms = list(dict.fromkeys([*first, *second]))
        numbers = [(first[term], second[term]) for term in terms]
        if not all(isinstance(x, sympy.Integer | int) for pair in numbers for x in pair):
            raise self._make_error(where, a, b)
        return sympy.Add(
            *(term * self.unify(int(x), int(y), where) for term, (x, y) in zip(terms, numbers, strict=True))
        )

    def _unify_operand(self, a: Any, b: Any, where: str) -> Any:
        if not isinstance(a, Value) or not isinstance(b, Value):
            return self.unify(a, b, where)
        if a.is_constant and b.is_constant and a not in self.twins:
            if a.data is not b.data and not _is_same_data(a.data, b.data):
                raise self._make_error(where, f"the constant {a.type}", f"the constant {b.type}")
            self.twins[a] = b
        if self.twins.get(a) is not b:
            raise self._make_error(where, a, b)
        return a

    def _unify_values(self, values: Any, others: Any, where: str) -> None:
        if len(values) != len(others):
            raise self._make_error(where, format_count(len(values), "value"), format_count(len(others), "value"))
        for a, b in zip(values, others, strict=True):
            if (a.type.dtype, a.type.rank) != (b.type.dtype, b.type.rank):
                raise self._make_error(where, a.type, b.type)
            a.type = TensorType(a.type.dtype, self.unify(a.type.shape, b.type.shape, where))
            self.twins[a] = b

    def _make_error(self, where: str, a: Any, b: Any) -> MismatchError:
        return MismatchError(
            f"the Python code computes other graphs for the lengths {self.pair.lengths} ({self.pair.symbol}): {where} "
            f"has {a} and {b}, which is no linear function of the length. Make each position compute the same"
        )


def _zip_nodes(graph: Graph, other: Graph) -> Iterator[tuple[Node, Node | None]]:
    twins = list(other.nodes)
    for i, node in enumerate(list(graph.nodes)):
        yield node, twins[i] if i < len(twins) else None


def _is_same_data(a: torch.Tensor | None, b: torch.Tensor | None) -> bool:
    return a is not None and b is not None and a.shape == b.shape and a.dtype == b.dtype and bool(torch.equal(a, b))
