"""Reduction of a failing graph to fewer outputs and nodes, and simpler elements, while it still fails."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
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
    single = next((c for run in case.runs if search.accepts(c := replace(case, runs=[run]))), None)
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
    for value in dict.fromkeys(cut.outputs):
        candidate = _Subgraph(_select_ancestors(nodes, cut.nodes, (value,)), (value,))
        if search.accepts(made(candidate)):
            return candidate
    return cut


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
    low, high = 0, len(cut.nodes) - 1
    while low < high:  # keeping from `low` on fails
        middle = (low + high + 1) // 2
        rest = cut.nodes[middle:]
        if search.accepts(made(_Subgraph(rest, cut.outputs))):
            low = middle
        else:
            high = middle - 1
    cut = _Subgraph(cut.nodes[low:], cut.outputs)
    low, high = 1, len(cut.nodes)
    while low < high:  # keeping up to `high` fails
        middle = (low + high) // 2
        front = cut.nodes[:middle]
        if search.accepts(made(_Subgraph(front, _sinks(nodes, front)))):
            high = middle
        else:
            low = middle + 1
    front = cut.nodes[:high]
    shorter = _Subgraph(front, _sinks(nodes, front))
    return shorter if high < len(cut.nodes) and search.accepts(made(shorter)) else cut


def _sinks(nodes: list[Node], kept: Sequence[int]) -> tuple[Value, ...]:
    """Return the results of the kept nodes that none of them reads."""
    read = {v for i in kept for v in nodes[i].inputs if isinstance(v, Value)}
    return tuple(v for i in kept for v in nodes[i].outputs if v not in read)


def _remove_nodes(cut: _Subgraph, nodes: list[Node], made: BuildSubgraph, search: _ReductionSearch) -> _Subgraph:
    """Drop nodes one by one, turning their results into inputs, until all are needed."""
    progress = True
    while progress and len(cut.nodes) > 1:
        progress = False
        for index in cut.nodes:
            rest = tuple(i for i in cut.nodes if i != index)
            lost = set(nodes[index].outputs)
            kept = tuple(v for v in cut.outputs if v not in lost)
            sinks = _sinks(nodes, rest)
            cuts = (
                _Subgraph(_select_ancestors(nodes, rest, kept), kept),
                _Subgraph(_select_ancestors(nodes, rest, sinks), sinks),
                _Subgraph(rest, kept),
            )
            for candidate in dict.fromkeys(cuts):
                if search.accepts(made(candidate)):
                    cut, progress = candidate, True
                    break
            if progress:
                break
    return cut


def _remove_outputs(cut: _Subgraph, nodes: list[Node], made: BuildSubgraph, search: _ReductionSearch) -> _Subgraph:
    """Drop outputs one by one, with the nodes that only they need, or without if the case must keep these."""
    for value in cut.outputs:
        outputs = tuple(v for v in cut.outputs if v is not value)
        for kept in (_select_ancestors(nodes, cut.nodes, outputs), cut.nodes):
            candidate = _Subgraph(kept, outputs)
            if search.accepts(made(candidate)):
                cut = candidate
                break
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
        operands = [mapping[v] if isinstance(v, Value) else v for v in node.inputs]
        twin = copy.insert(
            Node(node.op, operands, node.attrs, node.origin),
            [v.type for v in node.outputs],
            names=[v.name for v in node.outputs],
        )
        mapping.update(zip(node.outputs, twin.outputs, strict=True))
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
    progress = True
    while progress:
        progress = False
        for index, node in enumerate(case.graph.nodes):
            for position, operand in enumerate(node.inputs):
                candidate = _bypass_node(case, index, position)
                if isinstance(operand, Value) and candidate is not None and search.accepts(candidate):
                    case, progress = candidate, True
                    break
            if progress:
                break
    return case


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
    for position in range(len(case.runs[0].inputs)):
        for plain in _make_simpler_tensors(case.runs[0].inputs[position]):
            inputs = list(case.runs[0].inputs)
            inputs[position] = plain
            candidate = replace(case, runs=[replace(case.runs[0], inputs=tuple(inputs))])
            if search.accepts(candidate):
                case = candidate
                break
    for name in case.graph.constants:
        data = case.graph.constants[name].data
        for plain in _make_simpler_tensors(data) if data is not None else ():
            graph = case.graph.clone()
            graph.constants[name].data = plain
            if search.accepts(candidate := replace(case, graph=graph)):
                case = candidate
                break
    return case


def _make_simpler_tensors(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return simpler tensors of the same type and shape, the simplest first."""
    plain = [torch.zeros_like(tensor), torch.ones_like(tensor)]
    if tensor.is_floating_point():
        plain += [torch.arange(tensor.numel()).reshape(tensor.shape).to(tensor.dtype), tensor.round()]
    return [p for p in plain if not torch.equal(p, tensor)] if not torch.equal(plain[0], tensor) else []
