"""Merge branches on a size that compute the same: a slice to a length, taken only if the tensor is longer."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import sympy
import torch

from clika_ref.capture.dimensions import InputComparison, InputDim, resize_leaves
from clika_ref.capture.program import LIFTED_PREFIX, TracedGraph
from clika_ref.capture.symbols import TracedGuard
from clika_ref.core.errors import PassError
from clika_ref.core.execution import read_sizes
from clika_ref.core.guards import is_met
from clika_ref.core.ir import Graph, Value, walk
from clika_ref.core.registry import Registry, clean_graph
from clika_ref.core.symbols import resolve
from clika_ref.core.types import TensorType
from clika_ref.torch_internals.operators import OpOverload
from clika_ref.torch_internals.tensors import TorchDispatchMode
from clika_ref.torch_internals.trees import pytree

aten = torch.ops.aten

COMPARED_SIZES = 4
"""Number of sizes at which the graphs of two branches are compared."""

MAX_SIZE_CHANGE = 640
"""Largest change of a size in the search for another branch: two frames of speech models, of 320 samples each."""

MOVING_CALLS = {aten.clone.default, aten.copy_.default, aten.constant_pad_nd.default, aten.cat.default}
"""Calls besides views that only move elements."""

LIMITING_CALLS = frozenset({"slice", "slice_scatter", "pad", "split_with_sizes"})
"""Operators that may have no effect up to a constant length."""

MAX_LIMIT = 2**20
"""Largest such constant: larger ones mean the end of a tensor."""

MAX_COMPARED_SIZE = 256
"""Largest size at which the graphs of two branches are compared, unless they were traced at larger ones."""


def merge_branches(
    comparison: InputComparison,
    result: TracedGraph,
    leaves: Sequence[Any],
    trace: Callable[[list[Any]], TracedGraph],
    registry: Registry,
) -> tuple[TracedGraph, list[Any]] | None:
    """Return a graph that serves tracing inputs of several branches, and the inputs that it was traced with.

    None if all tracing inputs take the branches of the graph, or if the branches differ.
    """
    sizes = [read_sizes(result.graph, result.signature.graph_inputs(call)) for call in comparison.calls]
    violated = [_list_violated(result, s) for s in sizes]
    number = next((i for i, guards in enumerate(violated) if guards), None)
    if number is None:
        return None
    dims = _find_dims(comparison, result.graph, violated[number])
    changed = {dim: comparison.sizes[dim][number] for dim in dims if dim in comparison.sizes}
    return merge_branch(result, leaves, resize_leaves(list(leaves), changed), trace, registry)


def merge_branch(
    result: TracedGraph,
    leaves: Sequence[Any],
    other_leaves: list[Any],
    trace: Callable[[list[Any]], TracedGraph],
    registry: Registry,
) -> tuple[TracedGraph, list[Any]] | None:
    """Return a graph that also serves the branch that other inputs take, and the inputs that it was traced with.

    The other branch is traced as well. The branches are merged if one graph, at sizes of the other branch, is the graph
    of that branch, after removal of calls without effect. None if there is no such condition, or the graphs differ.
    """
    other = trace(other_leaves)
    for general, special, own, given in (
        (other, result, other_leaves, leaves),
        (result, other, list(leaves), other_leaves),
    ):
        if general.graph.symbols.keys() != special.graph.symbols.keys():
            return None
        first = read_sizes(special.graph, special.signature.graph_inputs(list(given)))
        excused = _list_violated(general, first)
        names = {str(symbol) for guard in excused for symbol in guard.guard.relation.free_symbols}
        if excused and all(
            _is_same_graph(general.graph, special.graph, s, registry)
            for s in _iterate_sizes(general, special, first, names, excused)
        ):
            kept = [guard for guard in general.guards if guard not in excused]
            return replace(general, guards=kept), own
    return None


def find_untraced_branch(
    comparison: InputComparison, group: Sequence[InputDim], result: TracedGraph, leaves: list[Any]
) -> list[Any] | None:
    """Return inputs that take a branch that no tracing input takes, with the nearest size of a group of equal dims.

    None if no size takes one that is at most half or twice the traced size, and `MAX_SIZE_CHANGE` away.
    """
    graph = result.graph
    traced = read_sizes(graph, result.signature.graph_inputs(leaves))
    places = {(comparison.names[dim.leaf], dim.dim) for dim in group}
    names = [name for name, s in graph.symbols.items() if (s.source.name, s.source.dim) in places]
    guards = [g for g in result.guards if any(str(s) in names for s in g.guard.relation.free_symbols)]
    own = TracedGraph(graph, result.signature, guards)
    if not names or not graph.symbols.keys() <= traced.keys() or not _list_branches(own):
        return None
    size = traced[names[0]]
    taken = {traced[name] for name in traced if name not in names}
    nearest = (size + sign * step for step in range(1, MAX_SIZE_CHANGE + 1) for sign in (-1, 1))
    for other in nearest:
        if size <= 2 * other and other <= 2 * size and other >= 2 and other not in taken:
            sizes = {**traced, **dict.fromkeys(names, other)}
            accepted = all(is_met(g.guard, sizes) for g in guards if g.is_testable)
            if accepted and _list_violated(own, sizes):
                return resize_leaves(leaves, dict.fromkeys(group, other))
    return None


class _CallCounter(TorchDispatchMode):
    """Counts the calls of each operator."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[OpOverload] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if isinstance(func, OpOverload):
            self.counts[func] += 1
        return func(*args, **(kwargs or {}))


def only_moves_more(run: Callable[[list[Any]], Any], leaves: list[Any], other: list[Any]) -> bool:
    """Whether a call with other inputs makes the same calls, and further ones that only move elements, as paddings do.

    False if the other call fails.

    Args:
        run: calls the model in eager.
        leaves: the inputs of the first call.
        other: those of the second one.
    """
    first, second = _CallCounter(), _CallCounter()
    try:
        for counter, given in ((first, leaves), (second, other)):
            with counter:
                run(given)
    except Exception:  # noqa: BLE001 - a model may raise anything
        return False
    more = second.counts - first.counts
    return bool(more) and not first.counts - second.counts and all(f.is_view or f in MOVING_CALLS for f in more)


def _list_branches(result: TracedGraph) -> list[TracedGuard]:
    """Return the guards of branches of the model's code, except those that exclude only sizes of 0 and 1."""
    return [g for g in result.guards if not g.is_testable and not g.excludes_small_sizes]


def _list_violated(result: TracedGraph, sizes: Mapping[str, int]) -> list[TracedGuard]:
    """Return the branches of the model's code that sizes do not take."""
    return [g for g in _list_branches(result) if not is_met(g.guard, sizes)]


def _find_dims(comparison: InputComparison, graph: Graph, guards: Sequence[TracedGuard]) -> list[InputDim]:
    """Return the dims of the inputs that guards read, and those with equal sizes in all inputs."""
    symbols = {symbol for guard in guards for symbol in guard.guard.relation.free_symbols}
    read = {(s.source.name, s.source.dim) for s in graph.symbols.values() if s.expr in symbols}
    groups = comparison.groups
    return [d for group in groups if any((comparison.names[d.leaf], d.dim) in read for d in group) for d in group]


def _iterate_sizes(
    general: TracedGraph,
    special: TracedGraph,
    first: Mapping[str, int],
    names: set[str],
    excused: Sequence[TracedGuard],
) -> Iterator[Mapping[str, int]]:
    """Yield the traced sizes of a branch, and others that take it: near ones, and ones beyond each constant."""
    yield first
    traced = first[min(names)]

    def takes_branch(size: int) -> bool:
        sizes = {**first, **dict.fromkeys(names, size)}
        own = all(is_met(guard.guard, sizes) for guard in special.guards if not guard.is_testable)
        return size != traced and own and not all(is_met(guard.guard, sizes) for guard in excused)

    near = (*range(2, MAX_COMPARED_SIZE), *range(max(traced, MAX_COMPARED_SIZE), traced + MAX_SIZE_CHANGE))
    limits = {traced, 4 * traced, *_list_limits(general.graph), *_list_limits(special.graph)}
    beyond = (next(filter(takes_branch, range(2 * n, 2 * n + MAX_SIZE_CHANGE)), None) for n in sorted(limits))
    chosen = [*itertools.islice(filter(takes_branch, near), COMPARED_SIZES - 1), *(n for n in beyond if n is not None)]
    for size in dict.fromkeys(chosen):
        yield {**first, **dict.fromkeys(names, size)}


def _list_limits(graph: Graph) -> set[int]:
    """Return the constants in the lengths of slices and paddings: beyond them, a branch may compute something else."""
    found: set[int] = set()
    for node in graph.nodes:
        if node.op_type in LIMITING_CALLS:
            for item in pytree.tree_leaves([*node.inputs, *node.attrs.values()]):
                atoms = item.atoms(sympy.Integer) if isinstance(item, sympy.Basic) else [item]
                found |= {abs(int(n)) for n in atoms if isinstance(n, int | sympy.Integer)}
    return {n for n in found if 1 < n <= MAX_LIMIT}


def _is_same_graph(a: Graph, b: Graph, sizes: Mapping[str, int], registry: Registry) -> bool:
    """Whether two graphs are the same at given sizes, after removal of calls without effect."""
    if any(node.bodies for graph in (a, b) for node in walk(graph)):
        return False
    numbers: dict[Hashable, int] = {}
    fixed = [_fix_sizes(graph, sizes) for graph in (a, b)]
    try:
        for graph in fixed:
            clean_graph(graph, registry)
    except PassError:  # a graph has no meaning at sizes that its guards exclude
        return False
    first, second = (_number_results(graph, numbers) for graph in fixed)
    return first == second


def _fix_sizes(graph: Graph, sizes: Mapping[str, int]) -> Graph:
    """Return a copy of a graph for fixed sizes."""
    copy = graph.clone()
    for node in copy.nodes:
        for position, item in enumerate(node.inputs):
            if not isinstance(item, Value):
                copy.set_input(node, position, resolve(item, sizes))
        node.attrs = {name: resolve(item, sizes) for name, item in node.attrs.items()}
    for value in (*copy.inputs, *(v for node in copy.nodes for v in node.outputs)):
        value.type = TensorType(value.type.dtype, resolve(value.type.shape, sizes))
    copy.symbols, copy.guards = {}, []
    return copy


def _number_results(graph: Graph, numbers: dict[Hashable, int]) -> list[int]:
    """Return a number for each output and state entry of a graph: equal ones are computed by the same calls."""
    known: dict[Value, int] = {}

    def find_number(value: Value) -> int:
        if value not in known:
            data = value.data if value.name.startswith(LIFTED_PREFIX) else None
            key = value.name if data is None else (str(value.type), tuple(data.flatten().tolist()))
            known[value] = numbers.setdefault(key, len(numbers))
        return known[value]

    for node in graph.nodes:
        operands = tuple(find_number(v) if isinstance(v, Value) else (type(v).__name__, str(v)) for v in node.inputs)
        call = (node.op_type, operands, str(sorted(node.attrs.items())))
        for value in node.outputs:
            known[value] = numbers.setdefault((call, value.index), len(numbers))
    return [find_number(value) for value in (*graph.outputs, *graph.state.values())]
