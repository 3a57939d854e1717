"""Reduction of a failing graph to fewer outputs and nodes, and simpler elements, while it still fails."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import starmap
from typing import Any

import sympy
import torch

from clika_ref.core.errors import ClikaError
from clika_ref.core.ir import Graph, Node, Value
from clika_ref.core.types import TensorType
from clika_ref_conformance.cases import CaseRun, GraphCase
from clika_ref_conformance.drawing.eager_values import compute_eager_values
from clika_ref_conformance.drawing.reducing.dims import reduce_symbols

FailurePredicate = Callable[[GraphCase], bool]
"""Returns whether a case still fails in the same way; an exception counts as False."""


def reduce_case(case: GraphCase, fails: FailurePredicate, seconds: float) -> GraphCase:
    """Return the smallest case found within the time limit that still fails, or the case itself.

    First, all runs but one failing run are removed, then outputs, then nodes. Values computed by removed nodes become
    inputs with their eager results; unneeded later nodes are dropped. Next, dynamic dims become shorter, or static if
    they need not be dynamic. Last, elements become zeros, ones or integers. If no single run fails, the case keeps its
    graph and only loses runs.

    Args:
        case: a failing case; its graph may have dynamic dims.
        fails: called once for each candidate.
        seconds: wall-clock limit, after which the best case so far is returned.

    """
    search = _ReductionSearch(fails, time.monotonic() + seconds)
    single = next(filter(search.accepts, (replace(case, runs=[run]) for run in case.runs)), None)
    if single is None:
        return _remove_runs(case, search)
    try:
        values = compute_eager_values(single.graph, single.runs[0].inputs)
    except ClikaError:
        return single  # eager fails on it, so there are no values to cut at
    single = _reduce_structure(single, values, search)
    single = reduce_symbols(_bypass_nodes(single, search), search.accepts)
    return _simplify_elements(single, search)


@dataclass
class _ReductionSearch:
    """The predicate and the deadline of a reduction."""

    fails: FailurePredicate
    deadline: float

    def accepts(self, case: GraphCase | None) -> bool:
        """Return whether there is time left and the candidate fails, too."""
        if case is None or time.monotonic() > self.deadline:
            return False
        try:
            return self.fails(case)
        except Exception:  # noqa: BLE001 - a check that raises does not confirm the failure
            return False


def _remove_runs(case: GraphCase, search: _ReductionSearch) -> GraphCase:
    """Remove runs one by one; a failure that needs an earlier run keeps both."""
    for run in case.runs:
        candidate = replace(case, runs=[r for r in case.runs if r is not run])
        if candidate.runs and search.accepts(candidate):
            case = candidate
    return case


@dataclass(frozen=True)
class _Subgraph:
    """A part of a graph: the indices of the kept nodes, and the returned values."""

    nodes: tuple[int, ...]
    outputs: tuple[Value, ...]


def _reduce_structure(case: GraphCase, values: dict[Value, torch.Tensor], search: _ReductionSearch) -> GraphCase:
    """Cut a case to single nodes first, as one faulty operator is the usual cause, then by halves, then by one."""
    nodes = list(case.graph.nodes)

    def build_subgraph(cut: _Subgraph) -> GraphCase | None:
        return _build_subgraph_case(case, nodes, cut, values)

    for index, node in enumerate(nodes):
        alone = _Subgraph((index,), tuple(node.outputs))
        if len(nodes) > 1 and search.accepts(build_subgraph(alone)):
            return build_subgraph(_remove_outputs(alone, nodes, build_subgraph, search)) or case
    cut = _Subgraph(tuple(range(len(nodes))), tuple(case.graph.outputs))
    if not search.accepts(build_subgraph(cut)):
        return case
    cut = _bisect_nodes(_keep_one_output(cut, nodes, build_subgraph, search), nodes, build_subgraph, search)
    for step in (_remove_nodes, _remove_outputs, _remove_nodes):
        cut = step(cut, nodes, build_subgraph, search)
    return build_subgraph(cut) or case


BuildSubgraph = Callable[[_Subgraph], GraphCase | None]


def _keep_one_output(cut: _Subgraph, nodes: list[Node], made: BuildSubgraph, search: _ReductionSearch) -> _Subgraph:
    """Keep one failing output and the nodes it needs, or all outputs if no single one fails."""
    cuts = (_Subgraph(_select_ancestors(nodes, cut.nodes, (v,)), (v,)) for v in dict.fromkeys(cut.outputs))
    return next((c for c in cuts if search.accepts(made(c))), cut)


def _select_ancestors(nodes: list[Node], kept: Iterable[int], outputs: Iterable[Value]) -> tuple[int, ...]:
    """Return the indices, among those kept, of nodes that the outputs depend on."""
    wanted, found = set(outputs), list[int]()
    for index in sorted(kept, reverse=True):
        if not wanted.isdisjoint(nodes[index].outputs):
            found.append(index)
            wanted.update(v for v in nodes[index].inputs if isinstance(v, Value))
    return tuple(reversed(found))


def _bisect_nodes(cut: _Subgraph, nodes: list[Node], made: BuildSubgraph, search: _ReductionSearch) -> _Subgraph:
    """Cut off the longest unneeded head, and then the longest unneeded tail, by bisection."""

    def fails_from(start: int) -> bool:
        return search.accepts(made(_Subgraph(cut.nodes[start:], cut.outputs)))

    def keep_front(end: int) -> _Subgraph:
        return _Subgraph(cut.nodes[:end], _sinks(nodes, cut.nodes[:end]))

    head = bisect_left(range(1, len(cut.nodes)), True, key=lambda start: not fails_from(start))
    cut = _Subgraph(cut.nodes[head:], cut.outputs)
    ends = range(1, len(cut.nodes))
    shorter = keep_front(1 + bisect_left(ends, True, key=lambda end: search.accepts(made(keep_front(end)))))
    return shorter if len(shorter.nodes) < len(cut.nodes) and search.accepts(made(shorter)) else cut


def _sinks(nodes: list[Node], kept: Sequence[int]) -> tuple[Value, ...]:
    """Return the results of the kept nodes that none of them reads."""
    read = {v for i in kept for v in nodes[i].inputs if isinstance(v, Value)}
    return tuple(v for i in kept for v in nodes[i].outputs if v not in read)


def _remove_nodes(cut: _Subgraph, nodes: list[Node], made: BuildSubgraph, search: _ReductionSearch) -> _Subgraph:
    """Drop nodes one by one, turning their results into inputs, until all are needed."""
    while len(cut.nodes) > 1:
        smaller = next((c for c in _cut_each_node(cut, nodes) if search.accepts(made(c))), None)
        if smaller is None:
            break
        cut = smaller
    return cut


def _cut_each_node(cut: _Subgraph, nodes: list[Node]) -> Iterator[_Subgraph]:
    """Yield parts of a graph without one of its nodes: with the same other outputs, or with all unread results."""
    for index in cut.nodes:
        rest = tuple(i for i in cut.nodes if i != index)
        kept = tuple(v for v in cut.outputs if v not in nodes[index].outputs)
        sinks = _sinks(nodes, rest)
        yield from dict.fromkeys(
            (
                _Subgraph(_select_ancestors(nodes, rest, kept), kept),
                _Subgraph(_select_ancestors(nodes, rest, sinks), sinks),
                _Subgraph(rest, kept),
            )
        )


def _remove_outputs(cut: _Subgraph, nodes: list[Node], made: BuildSubgraph, search: _ReductionSearch) -> _Subgraph:
    """Drop outputs one by one, with the nodes that only they need, or without if the case must keep these."""
    for value in cut.outputs:
        outputs = tuple(v for v in cut.outputs if v is not value)
        cuts = (_Subgraph(kept, outputs) for kept in (_select_ancestors(nodes, cut.nodes, outputs), cut.nodes))
        cut = next((c for c in cuts if search.accepts(made(c))), cut)
    return cut


def _build_subgraph_case(
    case: GraphCase, nodes: list[Node], cut: _Subgraph, values: dict[Value, torch.Tensor]
) -> GraphCase | None:
    """Build the graph of a cut, or return None if it has no nodes or no outputs."""
    if not cut.nodes or not cut.outputs:
        return None
    kept = [nodes[i] for i in cut.nodes]
    inside = {v for node in kept for v in node.outputs}
    read = dict.fromkeys(v for node in kept for v in node.inputs if isinstance(v, Value) and v not in inside)
    outside = list(dict.fromkeys([*read, *(v for v in cut.outputs if v not in inside)]))
    symbols = _symbols_of(kept, [*outside, *cut.outputs])
    outside += _find_symbol_sources(case.graph, symbols, {*outside, *inside})
    copy = Graph(case.graph.name)
    mapping: dict[Value, Value] = {}
    for value in [v for v in outside if v.data is not None]:
        assert value.data is not None
        mapping[value] = copy.add_constant(value.data, value.name)
    inputs = [v for v in outside if v.data is None]
    for value in inputs:
        mapping[value] = copy.add_input(value.type, value.name)
    for node in kept:
        copy.insert_copy(node, mapping)
    for value in cut.outputs:
        copy.add_output(mapping[value])
    _copy_symbols(case.graph, copy)
    run = replace(case.runs[0], inputs=tuple(values[v] for v in inputs))
    return replace(case, graph=copy, runs=[run], facts={**case.facts, "nodes": len(copy)})


def _symbols_of(nodes: Iterable[Node], values: Iterable[Value]) -> set[str]:
    """Return the names of all symbols in types, operands and attributes."""
    items: list[Any] = [v.type for v in values]
    for node in nodes:
        items += [*node.inputs, *node.attrs.values(), *(v.type for v in node.outputs)]
    return set().union(*map(_collect_symbol_names, items)) if items else set()


def _collect_symbol_names(item: Any) -> set[str]:
    if isinstance(item, Value | TensorType):
        return _collect_symbol_names(item.type.shape if isinstance(item, Value) else item.shape)
    if isinstance(item, tuple):
        return set().union(*map(_collect_symbol_names, item))
    return {str(s) for s in item.free_symbols} if isinstance(item, sympy.Basic) else set()


def _find_symbol_sources(graph: Graph, symbols: set[str], known: set[Value]) -> list[Value]:
    """Return the missing values that symbols are read from; they become otherwise unused inputs."""
    by_name = {
        v.name: v for v in (*graph.inputs, *graph.constants.values(), *(v for n in graph.nodes for v in n.outputs))
    }
    sources: dict[Value, None] = {}
    waiting, seen = list(symbols), set[str]()
    while waiting:
        name = waiting.pop()
        if name in seen or name not in graph.symbols:
            continue
        seen.add(name)
        value = by_name[graph.symbols[name].source.name]
        if value not in known:
            sources[value] = None
            waiting += _collect_symbol_names(value)
    return list(sources)


def _copy_symbols(whole: Graph, part: Graph) -> None:
    """Copy the symbols that are read from values of the part, and the guards that only use those."""
    names = {v.name for v in (*part.inputs, *part.constants.values(), *(v for n in part.nodes for v in n.outputs))}
    part.symbols.update({n: s for n, s in whole.symbols.items() if s.source.name in names})
    part.guards += [g for g in whole.guards if _collect_symbol_names(g.relation) <= part.symbols.keys()]


def _bypass_nodes(case: GraphCase, search: _ReductionSearch) -> GraphCase:
    """Remove nodes by letting their readers read an operand of the same type, as long as the case fails."""
    while True:
        places = ((i, p) for i, node in enumerate(case.graph.nodes) for p in range(len(node.inputs)))
        smaller = next(filter(search.accepts, starmap(partial(_bypass_node, case), places)), None)
        if smaller is None:
            return case
        case = smaller


def _bypass_node(case: GraphCase, index: int, position: int) -> GraphCase | None:
    graph = case.graph.clone()
    node = list(graph.nodes)[index]
    operand = node.inputs[position]
    if not isinstance(operand, Value) or len(node.outputs) != 1 or operand.type != node.output.type or len(graph) == 1:
        return None
    sources = {symbol.source.name for symbol in graph.symbols.values()}
    if node.output.name in sources:
        return None
    graph.replace(node.output, operand)
    graph.erase(node)
    graph.drop_unused_constants()
    kept = [i for i, v in enumerate(graph.inputs) if v.uses or v.name in sources]
    run = case.runs[0]
    run = CaseRun(run.name, tuple(run.inputs[i] for i in kept))
    graph.inputs[:] = [graph.inputs[i] for i in kept]
    return replace(case, graph=graph, runs=[run], facts={**case.facts, "nodes": len(graph)})


def _simplify_elements(case: GraphCase, search: _ReductionSearch) -> GraphCase:
    """Simplify the elements of inputs and constants, one tensor at a time: zeros, ones, or integers."""
    for position, tensor in enumerate(case.runs[0].inputs):
        candidates = (_replace_input(case, position, plain) for plain in _make_simpler_tensors(tensor))
        case = next(filter(search.accepts, candidates), case)
    for name, value in case.graph.constants.items():
        plain_tensors = _make_simpler_tensors(value.data) if value.data is not None else ()
        candidates = (_replace_constant(case, name, plain) for plain in plain_tensors)
        case = next(filter(search.accepts, candidates), case)
    return case


def _replace_input(case: GraphCase, position: int, tensor: torch.Tensor) -> GraphCase:
    run = case.runs[0]
    inputs = (*run.inputs[:position], tensor, *run.inputs[position + 1 :])
    return replace(case, runs=[replace(run, inputs=inputs)])


def _replace_constant(case: GraphCase, name: str, tensor: torch.Tensor) -> GraphCase:
    graph = case.graph.clone()
    graph.constants[name].data = tensor
    return replace(case, graph=graph)


def _make_simpler_tensors(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return simpler tensors of the same type and shape, the simplest first."""
    plain = [torch.zeros_like(tensor), torch.ones_like(tensor)]
    if tensor.is_floating_point():
        plain += [torch.arange(tensor.numel()).reshape(tensor.shape).to(tensor.dtype), tensor.round()]
    return [p for p in plain if not torch.equal(p, tensor)] if not torch.equal(plain[0], tensor) else []
