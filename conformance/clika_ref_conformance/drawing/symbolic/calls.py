"""A single graph for a drawn call at all sizes, and inputs to run it on."""

from __future__ import annotations

import itertools
import math
import zlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from random import Random
from typing import Any

import sympy
import torch

from clika_ref.core.accuracy import DOT
from clika_ref.core.errors import PassError
from clika_ref.core.ir import Graph, Node, Value
from clika_ref.core.samples import Call, TensorSample, realize
from clika_ref.core.symbols import Symbol, SymbolSource
from clika_ref.core.types import TensorType
from clika_ref_conformance.cases import CaseRun, GraphCase
from clika_ref_conformance.drawing.calls.call_graphs import build_call_graph, infer_result_types
from clika_ref_conformance.drawing.symbolic.size_dependence import (
    ReplayableCall,
    SizeDecision,
    find_size_numbers,
    infer_size_expressions,
    is_explained,
)


@dataclass(frozen=True)
class SymbolicCall:
    """A call with symbolic shapes: the graph, the free sizes, and the expression of each integer."""

    replayable: ReplayableCall
    graph: Graph
    varied_sizes: Sequence[SizeDecision]
    expressions: Mapping[int, sympy.Basic]
    ranges: Mapping[SizeDecision, tuple[int, int]]
    """The range of each free size within which the expressions hold."""
    input_sizes: Sequence[SizeDecision] = ()
    """Sizes that are no operand's dim; each is the length of a further, unused input."""

    @cached_property
    def runs(self) -> list[CaseRun]:
        """One run for each set of sizes without a 0; the smallest runs again after larger ones."""
        runs = [CaseRun(name, self._inputs(d, o)) for name, d, o in self._select_legal(self._draw_size_candidates())]
        if len(runs) > 1:
            smallest = min(runs, key=lambda r: sum(t.numel() for t in r.inputs))
            runs += [CaseRun(f"{r.name} again", r.inputs) for r in (smallest, runs[0])]
        return runs

    def empty(self) -> list[CaseRun]:
        """Return runs with one size set to 0 each, as far as the samples and eager accept them."""
        return [CaseRun(name, self._inputs(d, o)) for name, d, o in self._select_legal(self._draw_zero_candidates())]

    def _inputs(self, drawing: ReplayableCall, operands: Sequence[Any]) -> tuple[torch.Tensor, ...]:
        return (*_tensor_operands(operands), *(torch.zeros(drawing.size(place)) for place in self.input_sizes))

    def _select_legal(
        self, wanted: Iterable[tuple[str, dict[SizeDecision, int]]]
    ) -> Iterator[tuple[str, ReplayableCall, list[Any]]]:
        """Yield the usable sizes.

        Duplicates are left out, as are sizes that make samples draw another call, that eager rejects, or that change a
        dtype.
        """
        seen: list[list[tuple[int, ...]]] = []
        for name, sizes in wanted:
            drawing = self.replayable.redraw_with_sizes(sizes)
            if drawing is None or not is_explained(self.expressions, self.replayable, drawing):
                continue
            operands = realize_operands(drawing, name)
            declared = [v.type.dtype for v in self.graph.outputs]
            if operands is None or [t.dtype for t in drawing.call_eagerly(operands)] != declared:
                continue  # bincount ignores its weights if its input is empty
            if (shapes := [tuple(t.shape) for t in self._inputs(drawing, operands)]) not in seen:
                seen.append(shapes)
                yield name, drawing, operands

    def _draw_size_candidates(self) -> Iterator[tuple[str, dict[SizeDecision, int]]]:
        ranges = [(max(low, 0), high) for low, high in map(self.ranges.__getitem__, self.varied_sizes)]
        random = Random(self.replayable.seed)  # noqa: S311 - draws tests, not keys
        yield "as drawn", {}
        yield "maximum", dict(zip(self.varied_sizes, (high for _, high in ranges), strict=True))
        yield "minimum", dict(zip(self.varied_sizes, (low for low, _ in ranges), strict=True))
        for turn in range(2):
            yield f"coprime {turn}", dict(zip(self.varied_sizes, _choose_coprime(ranges, random), strict=True))
        for place, (low, _) in zip(self.varied_sizes, ranges, strict=True):
            if low <= 1:
                yield f"{place.symbol}=1", {place: 1}

    def _draw_zero_candidates(self) -> Iterator[tuple[str, dict[SizeDecision, int]]]:
        weight = self._find_weight_symbols()
        for place in self.varied_sizes:
            if place.symbol not in weight:
                yield f"{place.symbol}=0", {place: 0}

    def _find_weight_symbols(self) -> set[sympy.Basic]:
        """Return the sizes of weights: a layer without channels is useless, and hangs ONNX Runtime."""
        (node,) = self.graph.nodes
        weights = [v.type for v in node.inputs[1:] if isinstance(v, Value)] if node.op.error is DOT else []
        sides = [side for weight in weights for side in weight.shape if isinstance(side, sympy.Basic)]
        return set().union(*(side.free_symbols for side in sides))


def _tensor_operands(operands: Sequence[Any]) -> tuple[torch.Tensor, ...]:
    return tuple(o for o in operands if isinstance(o, torch.Tensor))


def make_static_case(drawing: ReplayableCall, name: str) -> GraphCase | None:
    """Return a drawn call with fixed sizes as a case with one run of this name, or None if eager rejects it."""
    operands = realize_operands(drawing, name)
    if operands is None:
        return None
    graph = build_call_graph(drawing.op, operands, drawing.call.attrs)
    return GraphCase(drawing.op.name, graph, [CaseRun(name, _tensor_operands(operands))])


def _choose_coprime(ranges: Sequence[tuple[int, int]], random: Random) -> list[int]:
    """Return one size from each range, pairwise coprime as far as possible."""
    chosen: list[int] = []
    for low, high in ranges:
        sizes = list(range(max(low, 2), high + 1)) or [high]
        random.shuffle(sizes)
        chosen.append(next((s for s in sizes if all(math.gcd(s, c) == 1 for c in chosen)), sizes[0]))
    return chosen


def realize_operands(drawing: ReplayableCall, name: str) -> list[Any] | None:
    """Return the operands of a call with elements, or None if no element is legal or eager rejects the call."""
    if any(isinstance(o, TensorSample) and _has_no_legal_element(o) for o in drawing.call.operands):
        return None
    generator = torch.Generator().manual_seed(zlib.crc32(f"{drawing.op.name}-{drawing.seed}-{name}".encode()))
    try:
        operands = [realize(o, generator) if isinstance(o, TensorSample) else o for o in drawing.call.operands]
        drawing.call_eagerly(operands)
    except Exception:  # noqa: BLE001 - any exception from eager means that the call is illegal at this size
        return None
    return operands


def has_no_elements(drawing: ReplayableCall) -> bool:
    """Return whether an operand or result of a drawn call is empty, so that the call tests little."""
    operands = realize_operands(drawing, "elements")
    if operands is None:
        return False
    return any(not tensor.numel() for tensor in (*_tensor_operands(operands), *drawing.call_eagerly(operands)))


def has_size_dependent_numbers(drawing: ReplayableCall) -> bool:
    """Return whether a number of a drawn call depends on sizes without being a tensor dim."""
    return bool(infer_size_expressions(drawing).keys() - {position for position, _, _ in _tensor_dims(drawing.call)})


def _has_no_legal_element(sample: TensorSample) -> bool:
    """Return whether a tensor has elements but an empty domain: indices along a dim of size 0."""
    return sample.domain is not None and sample.domain[0] > sample.domain[1] and 0 not in sample.shape


def make_symbolic_call(drawing: ReplayableCall, fixed: Collection[SizeDecision] = ()) -> SymbolicCall | str:
    """Return a call with as many symbolic sizes as possible, or the reason why there are none.

    A size becomes a symbol if three conditions hold. It is a dim of some operand, or the schema allows a size where it
    occurs; in the second case it is the length of a further input. Every number that depends on it follows an
    expression. The output types can be inferred. Other sizes, and those in ``fixed``, keep the drawn length.
    """
    expressions = infer_size_expressions(drawing)
    free = [p for p in drawing.ranges if p not in fixed and drawing.size(p) >= 0]
    counts = find_size_numbers(drawing)
    readable = {p for p in free if _is_operand_dim(p, drawing, expressions)}
    keeps_numbers = bool(readable) and zlib.crc32(drawing.seed.encode()) % 2 == 0  # half of the calls
    places = [p for p in free if p in readable or (not keeps_numbers and _is_number_only(p, counts, expressions))]
    if not places:
        return "no dim of the drawn call may vary"
    ranges = {p: found for p in places if (found := _find_valid_range(p, expressions, drawing)) is not None}
    if not ranges:
        return "no expression of the sizes gives its numbers"
    reasons: list[str] = []
    whole = _try_symbolic_call(drawing, expressions, ranges, reasons)
    if whole is not None:
        return whole
    best: SymbolicCall | None = None
    taken: list[SizeDecision] = []
    for place in ranges:
        found = _try_symbolic_call(drawing, expressions, {p: ranges[p] for p in (*taken, place)}, reasons)
        if found is not None:
            best, taken = found, [*taken, place]
    return reasons[0] if best is None else best


def _is_operand_dim(place: SizeDecision, drawing: ReplayableCall, expressions: Mapping[int, sympy.Basic]) -> bool:
    """Return whether a size is a dim of an operand."""
    return any(expressions.get(position) == place.symbol for position, _, _ in _tensor_dims(drawing.call))


def _is_number_only(place: SizeDecision, counts: set[int], expressions: Mapping[int, sympy.Basic]) -> bool:
    """Return whether a size only occurs among the numbers of a call, and only where a size is allowed."""
    positions = {position for position, e in expressions.items() if place.symbol in e.free_symbols}
    return bool(positions) and positions <= counts


def _tensor_dims(call: Call) -> Iterator[tuple[int, int, int]]:
    """Yield the leaf index, the tensor index and the dim of every tensor dim of a call."""
    position = tensors = 0
    for operand in call.operands:
        if isinstance(operand, TensorSample | torch.Tensor):
            for dim in range(len(operand.shape)):
                yield position + 1 + dim, tensors, dim
            position += len(operand.shape)
            tensors += 1
        position += 1


def _find_valid_range(
    place: SizeDecision, expressions: Mapping[int, sympy.Basic], drawing: ReplayableCall
) -> tuple[int, int] | None:
    """Return the lengths around the drawn one at which the expressions give the numbers of the call.

    None if these are not most of the lengths. Some numbers follow a size only from a minimum length on: ``x[-2:]`` has
    2 elements, except for an ``x`` with a single element.
    """
    if any(place.symbol in e.free_symbols and not _has_integer_coefficients(e) for e in expressions.values()):
        return None
    first, last = drawing.ranges[place]
    high = min(last, first + 8)

    def is_explained_at(length: int) -> bool:
        found = drawing.redraw_with_sizes({place: length})
        return found is None or is_explained(expressions, drawing, found)

    here = drawing.size(place)
    below = itertools.takewhile(is_explained_at, range(min(here, high), first - 1, -1))
    above = itertools.takewhile(is_explained_at, range(min(here, high), high + 1))
    lawful = [*below, *above]
    if not lawful or 2 * (max(lawful) - min(lawful) + 1) <= high - first + 1:
        return None
    return min(lawful), last if max(lawful) == high else max(lawful)


def _has_integer_coefficients(expression: sympy.Basic) -> bool:
    return all(not n.is_Rational or n.is_Integer for n in sympy.preorder_traversal(expression))


def _try_symbolic_call(
    drawing: ReplayableCall,
    expressions: Mapping[int, sympy.Basic],
    ranges: Mapping[SizeDecision, tuple[int, int]],
    reasons: list[str],
) -> SymbolicCall | None:
    places = list(ranges)
    symbols = {p.symbol for p in places}
    fixed = {p.symbol: drawing.size(p) for p in drawing.ranges if p.symbol not in symbols}
    found = {i: e.xreplace({s: sympy.Integer(n) for s, n in fixed.items()}) for i, e in expressions.items()}
    kept = {i: e for i, e in found.items() if e.free_symbols}
    carried = [p for p in places if not _is_operand_dim(p, drawing, expressions)]
    try:
        graph = _build_graph(drawing, kept, symbols, carried)
    except PassError as error:
        reasons.append(str(error))
        return None
    return SymbolicCall(drawing, graph, places, kept, ranges, carried)


def _build_graph(
    drawing: ReplayableCall,
    expressions: Mapping[int, sympy.Basic],
    symbols: set[sympy.Symbol],
    carried: Sequence[SizeDecision],
) -> Graph:
    op = drawing.op
    call = _substitute_expressions(drawing.call, expressions)
    graph = Graph(op.name)
    inputs = [graph.add_input(o, f"x{len(graph.inputs)}") if isinstance(o, TensorType) else o for o in call.operands]
    for place in carried:
        graph.add_input(TensorType(torch.float32, (place.symbol,)), f"size{len(graph.inputs)}")
    for value in graph.inputs:
        for dim, side in enumerate(value.type.shape):
            if side in symbols and str(side) not in graph.symbols:
                graph.symbols[str(side)] = Symbol(str(side), 0, None, SymbolSource(value.name, dim))
    types = infer_result_types(
        op, inputs, call.attrs, lambda: drawing.call_eagerly(realize_operands(drawing, "types") or ())
    )
    for value in graph.insert(Node(op, inputs, call.attrs), types).outputs:
        graph.add_output(value)
    return graph


def _substitute_expressions(call: Call, expressions: Mapping[int, sympy.Basic]) -> Call:
    """Replace the integers of a call by expressions, in the order of `leaves`, and tensors by their types."""
    counter = itertools.count()

    def substitute_leaf(item: Any) -> Any:
        return expressions.get(next(counter), item)

    def substitute_attr(item: Any) -> Any:
        if isinstance(item, tuple):
            next(counter)
            return tuple(map(substitute_attr, item))
        return substitute_leaf(item)

    operands: list[Any] = []
    for o in call.operands:
        if isinstance(o, TensorSample | torch.Tensor):
            next(counter)
            operands.append(TensorType(o.dtype, tuple(substitute_leaf(side) for side in o.shape)))
        else:
            operands.append(substitute_leaf(o))
    found = {name: substitute_attr(call.attrs[name]) for name in sorted(call.attrs)}
    return Call(tuple(operands), {name: found[name] for name in call.attrs})
