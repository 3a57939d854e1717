"""The tensors that a quantized model and its float form are compared by: outputs, or branches of them.

One norm over a concatenation of boxes in pixels and scores from 0 to 1 would hide the error of the scores: branches
with small norms count more. Detections that are selected by scores differ in number and order; the values that they are
selected from do not.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias

from torch import Tensor

from clika_ref.capture.detections import is_data_dependent
from clika_ref.core.ir import Graph, Node, Value
from clika_ref.core.traits import UNIFIED_QPARAMS

Slice: TypeAlias = "tuple[int, int, int]"
"""A part of a tensor: dim, start and length."""


@dataclass(frozen=True)
class OutputBranches:
    """The branches of some values: the operands of a concatenation, or a value as a whole."""

    values: Sequence[Value]

    @cached_property
    def _slices(self) -> list[list[tuple[Slice, ...]]]:
        """The branches of each value, as slices that are taken one after another."""
        return [[*_iter_branches(value)] for value in self.values]

    @property
    def names(self) -> list[str]:
        """A name for each tensor that `split` returns."""
        return [
            " ".join([value.name, *(f"[{start}:{start + length} of dim {dim}]" for dim, start, length in slices)])
            for value, branches in zip(self.values, self._slices, strict=True)
            for slices in branches
        ]

    def split(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return the branches of ``tensors``, one for each value and of its shape, as views."""
        return [
            _take(tensor, slices) for tensor, branches in zip(tensors, self._slices, strict=True) for slices in branches
        ]

    def compute_weights(self, squared_norms: Sequence[float]) -> list[float]:
        """Return a factor for the squared error of each branch; the sum of the products is the relative error.

        It is a mean over the values that are not 0. In each, the error of a branch counts relative to the norm of the
        value, or of the branch itself, divided by the number of branches, whichever is more. A branch never counts less
        than without the split.

        Args:
            squared_norms: one for each tensor that `split` returns.
        """
        left = iter(squared_norms)
        by_value = [[next(left) for _ in branches] for branches in self._slices]
        count = sum(map(any, by_value))
        return [
            max(1 / sum(norms), 1 / (len(norms) * norm) if norm else 0.0) / count if any(norms) else 0.0
            for norms in by_value
            for norm in norms
        ]


@dataclass(frozen=True)
class ComparedOutputs:
    """The tensors of one graph that are compared."""

    graph: Graph

    @cached_property
    def values(self) -> tuple[Value, ...]:
        """The float outputs; for one whose size depends on the data, the values that its elements are selected from."""
        found: dict[Value, None] = {}
        for output in self.graph.outputs:
            if has_data_dependent_size(self.graph, output):
                found.update(dict.fromkeys(_find_selected_values(self.graph, output)))
            elif output.type.dtype.is_floating_point:
                found[output] = None
        return tuple(found)

    @cached_property
    def branches(self) -> OutputBranches:
        """The branches of `values`: the tensors that are compared."""
        return OutputBranches(self.values)

    def make_graph(self) -> Graph:
        """Return a graph whose float outputs are `values`: the graph itself, or a clone without unused nodes."""
        if [*self.values] == [v for v in self.graph.outputs if v.type.dtype.is_floating_point]:
            return self.graph
        twin = self.graph.clone(self.values)
        needed = {*twin.outputs, *twin.state.values()}
        for node in list(twin.nodes_backward()):
            if needed.isdisjoint(node.outputs):
                twin.erase(node)
            else:
                needed.update(v for v in node.inputs if isinstance(v, Value))
        sources = {v.name for v in (*twin.inputs, *needed)}
        twin.symbols = {name: symbol for name, symbol in twin.symbols.items() if symbol.source.name in sources}
        return twin


def has_data_dependent_size(graph: Graph, value: Value) -> bool:
    """Return whether a size of a value depends on the elements of tensors."""
    return any(is_data_dependent(graph, size) for size in value.type.shape)


def _find_selected_values(graph: Graph, output: Value) -> list[Value]:
    """Return the last computed float values of known size that an output is selected from, in graph order."""
    selected: set[Value] = set()
    visited: set[Value] = set()
    stack = [output]
    while stack:
        value = stack.pop()
        if value in visited or value.producer is None:
            continue
        visited.add(value)
        if value.type.dtype.is_floating_point and not has_data_dependent_size(graph, value):
            selected.add(value)
        else:
            stack.extend(v for v in value.producer.inputs if isinstance(v, Value))
    return [v for v in _list_layer_results(graph) if v in selected]


def _list_layer_results(graph: Graph) -> list[Value]:
    """Return the results of layers, and all values computed from them, in graph order."""
    found: dict[Value, None] = {}
    for node in graph.nodes:
        is_layer = node.op.trait.weight is not None or node.op.trait.matrices is not None
        if is_layer or any(v in found for v in node.inputs if isinstance(v, Value)):
            found.update(dict.fromkeys(node.outputs))
    return [*found]


def _iter_branches(value: Value, slices: tuple[Slice, ...] = ()) -> Iterator[tuple[Slice, ...]]:
    """Yield the slices of each operand of a concatenation, also of nested ones, or of an operator after it."""
    joint = _find_join(value)
    if joint is None:
        yield slices
        return
    dim, start = joint.attrs["dim"] % value.type.rank, 0
    for operand in joint.inputs:
        size = operand.type.shape[dim]
        yield from _iter_branches(operand, (*slices, (dim, start, size)))
        start += size


def _find_join(value: Value) -> Node | None:
    """Return the node that concatenates several tensors of static lengths to a value, also before unary operators."""
    node = value.producer
    while node is not None and not _is_join(node):
        computed = [v for v in node.inputs if isinstance(v, Value) and not v.is_constant]
        trait = node.op.trait
        if len(computed) != 1 or trait.weight is not None or trait.matrices is not None:
            return None
        (value,) = computed
        if value.type.shape != node.outputs[0].type.shape:
            return None
        node = value.producer
    return node


def _is_join(node: Node) -> bool:
    """Return whether a node concatenates several tensors of static lengths along a dim, but not that of the batch."""
    operands = [v for v in node.inputs if isinstance(v, Value)]
    dim = node.attrs.get("dim")
    if node.op.trait is not UNIFIED_QPARAMS or dim is None or len(operands) < 2 or len(operands) < len(node.inputs):
        return False
    whole = node.output.type.shape
    if any(v.type.rank != len(whole) for v in operands) or dim % len(whole) == 0:
        return False
    sizes = [v.type.shape[dim] for v in (*operands, node.output)]
    return all(isinstance(size, int) for size in sizes) and sum(sizes[:-1]) == sizes[-1]


def _take(tensor: Tensor, slices: Sequence[Slice]) -> Tensor:
    for dim, start, length in slices:
        tensor = tensor.narrow(dim, start, length)
    return tensor
