"""Find the repeated iterations of an unrolled Python loop in a graph, and how each iteration reads its operands."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from clika_ref.core.ir import Graph, Node, Value

MAX_SKIPPED_NODES = 16
"""Maximum number of nodes between those of the first iteration that are computed only once, such as initial states."""

VARYING_ATTRIBUTES = {"select_scatter": "index"}
"""The attribute of an operator that may count the iterations."""

Path: TypeAlias = "tuple[tuple[int, int], ...]"
"""Selections from a tensor, each by its dim and its index, in order."""


@dataclass(frozen=True)
class OuterRead:
    """A tensor that an operand reads: ``root``, followed by selections along ``path``."""

    root: Value
    path: Path = ()


@dataclass(frozen=True)
class Inner:
    """An operand that is output ``index`` of node ``node`` of the same iteration, with selections along ``path``."""

    node: int
    index: int
    path: Path


@dataclass(frozen=True)
class Carried:
    """An operand that is output ``index`` of node ``node`` of the iteration before; ``initial`` in the first one."""

    node: int
    index: int
    path: Path
    initial: OuterRead


@dataclass(frozen=True)
class ScannedRow:
    """An operand that is row ``start + step * k`` along ``dim`` of an outer tensor in iteration ``k`` of ``count``.

    Selections along ``before`` precede the row, and those along ``after`` follow it.
    """

    root: Value
    before: Path
    dim: int
    start: int
    step: int
    after: Path
    count: int


@dataclass(frozen=True)
class IterationNumber:
    """An operand that is the number ``start + step * k`` in iteration ``k``."""

    start: int
    step: int


@dataclass(frozen=True)
class Literal:
    """A number, an expression or None: the operand of all iterations."""

    item: Any


Operand: TypeAlias = "Inner | Carried | ScannedRow | IterationNumber | Literal | OuterRead"
"""How each iteration gets an operand; a `OuterRead` is the same outer tensor in all of them."""


@dataclass(frozen=True)
class RepeatedIterations:
    """The iterations of an unrolled loop, each with the same nodes, and the operands of these nodes."""

    iterations: Sequence[Sequence[Node]]
    operands: Sequence[Sequence[Operand]]
    writes: Mapping[int, IterationNumber]
    """The index of each node that writes a row of a preallocated tensor, by its position in the iteration."""

    @property
    def count(self) -> int:
        """The number of iterations."""
        return len(self.iterations)

    @property
    def carried(self) -> Sequence[Carried]:
        """The distinct values that an iteration gets from the one before."""
        found = (o for position, row in enumerate(self.operands) if position not in self.writes for o in row)
        return list(dict.fromkeys(o for o in found if isinstance(o, Carried)))


def resolve_read(value: Value) -> OuterRead:
    """Follow selections of single rows back to the tensor that they start from."""
    path: list[tuple[int, int]] = []
    while value.producer is not None and value.producer.op_type == "select":
        source, index = value.producer.first_tensor, value.producer.attrs["index"]
        dim = value.producer.attrs["dim"] % source.type.rank
        size = source.type.shape[dim]
        if not isinstance(index, int) or (index < 0 and not isinstance(size, int)):
            break
        path.append((dim, index if index >= 0 else index + size))
        value = source
    return OuterRead(value, tuple(reversed(path)))


def find_repeated_iterations(graph: Graph, counts: Collection[int]) -> RepeatedIterations | None:
    """Return the first loop in a graph with one of these numbers of iterations; None if there is none.

    A loop is a sequence of nodes that repeats: node by node, the operators, attributes and types are equal. Each
    operand is a value of the same iteration, of the one before, a row whose index counts the iterations, or the same
    value in all of them. Selections of rows, and nodes that read no tensor, may be anywhere.
    """
    created = list_created_tensors(graph)
    nodes = [n for n in graph.nodes if n not in created and n.op_type != "select"]
    codes = _encode(nodes)
    for period, start, length in _iterate_periods(codes, min(counts)):
        found = [
            loop
            for phase in range(start, start + period)
            if (loop := _match_run(nodes, codes, (phase, period, start + length), counts, created)) is not None
        ]
        if found:
            return max(found, key=lambda loop: (loop.count, -len(loop.carried)))
    return None


def list_created_tensors(graph: Graph) -> dict[Node, Any]:
    """Return the nodes that read no tensor, each with a key that is equal for equal calls."""
    return {
        node: (node.op.name, _make_key(node.inputs), tuple((k, _make_key(v)) for k, v in sorted(node.attrs.items())))
        for node in graph.nodes
        if not node.bodies and not node.is_random and not any(isinstance(v, Value) for v in node.inputs)
    }


def _make_key(item: Any) -> Any:
    """Return a key of a literal that separates 1, 1.0 and True."""
    return tuple(map(_make_key, item)) if isinstance(item, tuple) else (type(item).__name__, str(item))


def _encode(nodes: Sequence[Node]) -> list[int]:
    """Return one number for each node, equal for nodes that two iterations of a loop may have in the same position."""
    numbers: dict[Any, int] = {}
    return [numbers.setdefault(_make_signature(node), len(numbers)) for node in nodes]


def _make_signature(node: Node) -> Any:
    if node.bodies:
        return id(node)
    varying = VARYING_ATTRIBUTES.get(node.op_type)
    attrs = tuple((k, _make_key(v)) for k, v in sorted(node.attrs.items()) if k != varying)
    return (
        node.op_type,
        tuple(_describe_operand(v) for v in node.inputs),
        attrs,
        tuple(v.type for v in node.outputs),
    )


def _describe_operand(item: Any) -> Any:
    if isinstance(item, Value):
        return item.name if item.is_constant else item.type
    return "int" if type(item) is int else _make_key(item)


def _iterate_periods(codes: Sequence[int], minimum: int) -> Iterator[tuple[int, int, int]]:
    """Yield ``(period, start, length)`` of each run that repeats ``minimum - 1`` times, short periods first."""
    whole = torch.tensor(codes, dtype=torch.int64)
    for period in range(1, len(codes) // max(minimum - 1, 1) + 1):
        equal = whole[:-period] == whole[period:]
        edges = torch.diff(equal.to(torch.int8), prepend=torch.zeros(1), append=torch.zeros(1))
        starts, ends = (edges == 1).nonzero().flatten().tolist(), (edges == -1).nonzero().flatten().tolist()
        for start, end in zip(starts, ends, strict=True):
            if end - start >= period * (minimum - 2) and end - start >= period:
                yield period, start, end - start + period


def _match_run(
    nodes: Sequence[Node],
    codes: Sequence[int],
    run: tuple[int, int, int],
    counts: Collection[int],
    created: Mapping[Node, Any],
) -> RepeatedIterations | None:
    """Return the loop that starts at ``run``, ``(phase, period, end)``; its first iteration may lie before it."""
    phase, period, end = run
    longest = (end - phase) // period
    first = _find_first_iteration(nodes, codes, phase, period)
    for count in sorted({min(longest, c) for c in counts}, reverse=True):
        own = [nodes[phase + k * period : phase + (k + 1) * period] for k in range(count)]
        for iterations in (*([[first, *own]] if first else []), own):
            loop = _match_iterations(iterations, created) if len(iterations) in counts else None
            if loop is not None:
                return loop
    return None


def _find_first_iteration(
    nodes: Sequence[Node], codes: Sequence[int], phase: int, period: int
) -> Sequence[Node] | None:
    """Return the iteration before a phase, between whose nodes others may lie."""
    found: list[Node] = []
    position, skipped = phase - 1, 0
    for wanted in reversed(codes[phase : phase + period]):
        while position >= 0 and codes[position] != wanted and skipped < MAX_SKIPPED_NODES:
            position, skipped = position - 1, skipped + 1
        if position < 0 or codes[position] != wanted:
            return None
        found.append(nodes[position])
        position -= 1
    return found[::-1]


def _match_iterations(iterations: Sequence[Sequence[Node]], created: Mapping[Node, Any]) -> RepeatedIterations | None:
    """Return the loop of these iterations, or None if an operand follows no rule."""
    places = {
        value: (k, position, value.index)
        for k, nodes in enumerate(iterations)
        for position, node in enumerate(nodes)
        for value in node.outputs
    }
    match = _OperandMatch(places, created)
    operands: list[list[Operand]] = []
    writes: dict[int, IterationNumber] = {}
    for position, nodes in enumerate(zip(*iterations, strict=True)):
        row = [match.find(column) for column in zip(*(node.inputs for node in nodes), strict=True)]
        if any(operand is None for operand in row):
            return None
        operands.append([operand for operand in row if operand is not None])
        varying = VARYING_ATTRIBUTES.get(nodes[0].op_type)
        if varying is not None:
            index = _find_progression([node.attrs[varying] for node in nodes])
            if index is None:
                return None
            writes[position] = index
    loop = RepeatedIterations(iterations, operands, writes)
    is_found = all(_is_write_only(loop, position) for position in writes) and _is_separable(loop)
    return loop if is_found else None


def _is_write_only(loop: RepeatedIterations, position: int) -> bool:
    """Whether the loop writes to a tensor by a node at this position, but reads none of its rows."""
    buffer = loop.operands[position][0]
    if not isinstance(buffer, Carried) or (buffer.node, buffer.path) != (position, ()):
        return False
    others = [o for p, row in enumerate(loop.operands) for j, o in enumerate(row) if (p, j) != (position, 0)]
    return not any(isinstance(o, Inner | Carried) and o.node == position for o in others)


def _is_separable(loop: RepeatedIterations) -> bool:
    """Whether no operand from outside the loop is computed from a value of the loop."""
    own = {node for nodes in loop.iterations for node in nodes}
    stack = [value for node in own for value in node.outputs]
    later: set[Value] = set()
    while stack:
        for use in stack.pop().uses:
            if isinstance(use.user, Node) and use.user not in own:
                fresh = [v for v in use.user.outputs if v not in later]
                later.update(fresh)
                stack += fresh
    outer = [o for row in loop.operands for o in row if isinstance(o, OuterRead | ScannedRow | Carried)]
    return not any((o.initial.root if isinstance(o, Carried) else o.root) in later for o in outer)


@dataclass(frozen=True)
class _OperandMatch:
    """Finds the rule that one operand follows in all iterations."""

    places: Mapping[Value, tuple[int, int, int]]
    """The iteration, the position and the index of each value of the loop."""
    created: Mapping[Node, Any]

    def find(self, column: Sequence[Any]) -> Operand | None:
        """Return the rule for an operand, given in each iteration; None if there is none."""
        if not all(isinstance(item, Value) for item in column):
            return _match_literals(column)
        reads = [resolve_read(item) for item in column]
        inside = [self.places.get(read.root) for read in reads]
        if inside[-1] is not None:
            return self._match_inner(reads, inside)
        return self._match_outer(reads) if not any(inside) else None

    def _match_inner(
        self, reads: Sequence[OuterRead], inside: Sequence[tuple[int, int, int] | None]
    ) -> Inner | Carried | None:
        later = {
            (k - place[0], *place[1:], reads[k].path) if (place := inside[k]) else None for k in range(1, len(reads))
        }
        found = later.pop()
        if later or found is None:
            return None
        delay, node, index, path = found
        if delay == 0 and inside[0] == (0, node, index) and reads[0].path == path:
            return Inner(node, index, path)
        return Carried(node, index, path, reads[0]) if delay == 1 and inside[0] is None else None

    def _match_outer(self, reads: Sequence[OuterRead]) -> OuterRead | ScannedRow | None:
        roots = dict.fromkeys(read.root for read in reads)
        if len(roots) > 1:
            keys = {
                (self.created[r.producer], r.index) if r.producer is not None and r.producer in self.created else r
                for r in roots
            }
            return reads[0] if len(keys) == 1 and len({read.path for read in reads}) == 1 else None
        if len({read.path for read in reads}) == 1:
            return reads[0]
        if len({tuple(dim for dim, _ in read.path) for read in reads}) > 1:
            return None
        columns = list(zip(*(read.path for read in reads), strict=True))
        (level, *others) = [i for i, column in enumerate(columns) if len(set(column)) > 1]
        index = _find_progression([i for _, i in columns[level]])
        if others or index is None:
            return None
        first = reads[0]
        before, after = first.path[:level], first.path[level + 1 :]
        return ScannedRow(first.root, before, first.path[level][0], index.start, index.step, after, len(reads))


def _match_literals(column: Sequence[Any]) -> Literal | IterationNumber | None:
    """Return the rule for operands that are no tensors."""
    if any(isinstance(item, Value) for item in column):
        return None
    if len(set(map(_make_key, column))) == 1:
        return Literal(column[0])
    return _find_progression(column) if all(type(item) is int for item in column) else None


def _find_progression(numbers: Sequence[Any]) -> IterationNumber | None:
    """Return the arithmetic progression of some integers; None if they are none, or all equal."""
    if not all(type(number) is int for number in numbers):
        return None
    steps = {b - a for a, b in itertools.pairwise(numbers)}
    return IterationNumber(numbers[0], steps.pop()) if len(steps) == 1 and 0 not in steps else None
