"""Replace the repeated iterations of an unrolled loop by one ``scan`` node, whose body computes one iteration."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from clika_ref.capture.loops.repeated_iterations import (
    Carried,
    Inner,
    IterationNumber,
    Literal,
    Operand,
    OuterRead,
    RepeatedIterations,
    ScannedRow,
    find_repeated_iterations,
    resolve_read,
)
from clika_ref.capture.messages import MismatchError
from clika_ref.core.inference import Builder
from clika_ref.core.ir import Graph, Node, Value
from clika_ref.core.operators import Operator
from clika_ref.core.rewriter import Rule, Skip, apply_rules, erase_dead, rule, substitute
from clika_ref.core.types import TensorType

VIEWS = ("permute", "slice", "unsqueeze", "expand", "reshape")
"""Operators that rearrange a tensor; iterations often repeat them on a tensor from outside."""

MIN_JOINED_ROWS = 2
"""Minimum number of successive rows that are joined to one tensor."""


def roll_loops(graph: Graph, operators: Mapping[str, Operator], counts: Collection[int]) -> int:
    """Replace each unrolled loop with one of these numbers of iterations by a ``scan`` node; return their number.

    Raises:
        MismatchError: a call between the iterations cannot be moved.
    """
    apply_rules(graph, NORMAL_FORMS, operators)
    for node in graph.nodes_backward():
        if node.op_type in (*VIEWS, "select") and not node.output.use_count:  # views that were only written to
            graph.erase(node)
    _merge_repeated_calls(graph, min(counts))
    found = 0
    while (loop := find_repeated_iterations(graph, counts)) is not None:
        _LoopRoller(graph, operators, loop).run()
        apply_rules(graph, JOINS, operators)
        found += 1
    return found


class _LoopRoller:
    """Replaces the iterations of one loop by a node."""

    def __init__(self, graph: Graph, operators: Mapping[str, Operator], loop: RepeatedIterations) -> None:
        self.graph = graph
        self.loop = loop
        self.own = {node for nodes in loop.iterations for node in nodes}
        self.last = loop.iterations[-1]
        order = list(graph.nodes)
        positions = [i for i, node in enumerate(order) if node in self.own]
        self.between = [node for node in order[positions[0] : positions[-1]] if node not in self.own]
        following = order[positions[-1] + 1 : positions[-1] + 2]
        self.operators = operators
        self.build = Builder(graph, operators, following[0] if following else None, self.last[0].origin)
        self.body = graph.new_body(f"{self.last[0].name}.loop")
        self.inside = Builder(self.body, operators, None, self.last[0].origin)
        self.results: dict[tuple[int, int], Value] = {}
        """The values of the body, by node and output."""
        self.inputs: dict[Any, Value] = {}
        """The inputs of the body, by the operands that they hold."""

    def run(self) -> None:
        """Insert the node, make all readers read its results, and erase the iterations."""
        moved = self._find_later_nodes()
        operands, counts = self._declare_inputs()
        self._write_body()
        carried = self.loop.carried
        collected = self._list_collected()
        for state in carried:
            self.body.add_output(self._select_inner(state))
        for key in collected:
            self.body.add_output(self._read_collected(key))
        count = self.loop.count
        types = [v.type for v in self.body.outputs[: len(carried)]]
        types += [TensorType(v.type.dtype, (count, *v.type.shape)) for v in self.body.outputs[len(carried) :]]
        node = Node(self.operators["scan"], operands, counts, self.build.origin, [self.body])
        self.graph.insert(node, types, self.build.before, [self.last[0].name] * len(types))
        for key, value in zip(collected, node.outputs[len(carried) :], strict=True):
            self._replace_collected(key, value)
        self._replace_carried(node, carried)
        for late in moved:
            self._move(late)
        for late in reversed(moved):
            self.graph.erase(late)
        for nodes in reversed(self.loop.iterations):
            for old in reversed(nodes):
                self._erase_with_selections(old)
        erase_dead(self.graph, *(n for n in self.graph.nodes if n.op_type in ("select", "full")))

    def _erase_with_selections(self, old: Node) -> None:
        """Erase a node of an iteration, and the selections of its results, which the body makes itself."""
        readers = {use.user for value in old.outputs for use in value.uses}
        erase_dead(self.graph, *(reader for reader in readers if isinstance(reader, Node)))
        if old in self.graph:
            self.graph.erase(old)

    # The body

    def _declare_inputs(self) -> tuple[list[Any], dict[str, Any]]:
        """Add the inputs of the body; return the operands of the node, and the counts of carried and scanned ones."""
        examples = {
            operand: node.inputs[j]
            for position, node in enumerate(self.last)
            for j, operand in enumerate(self.loop.operands[position])
        }
        operands: list[Any] = []
        for state in self.loop.carried:
            operands.append(self._read_outer(state.initial))
            self.inputs[state] = self.body.add_input(examples[state].type, examples[state].name)
        counts = {"carried": len(operands)}
        rows = dict.fromkeys(_without_selections(o) for o in examples if isinstance(o, ScannedRow | IterationNumber))
        for row in rows or [IterationNumber(0, 1)]:
            stacked = self._count(row) if isinstance(row, IterationNumber) else _take_rows(self.build, row)
            operands.append(stacked)
            self.inputs[row] = self.body.add_input(
                TensorType(stacked.type.dtype, stacked.type.shape[1:]), f"{stacked.name}_row"
            )
        counts["scanned"] = len(operands) - counts["carried"]
        for read in examples:
            if isinstance(read, OuterRead) and (read.path or not read.root.is_constant) and self._is_in_body(read):
                operands.append(self._read_outer(read))
                self.inputs[read] = self.body.add_input(operands[-1].type, operands[-1].name)
        return operands, counts

    def _is_in_body(self, read: OuterRead) -> bool:
        """Whether a node of the body reads a tensor from outside."""
        rows = (row for position, row in enumerate(self.loop.operands) if position not in self.loop.writes)
        return any(read in row for row in rows) or any(self.loop.operands[p][1] == read for p in self.loop.writes)

    def _count(self, counter: IterationNumber) -> Value:
        end = counter.start + counter.step * self.loop.count
        return self.build("arange", start=counter.start, end=end, step=counter.step, dtype=torch.int64)

    def _read_outer(self, read: OuterRead) -> Value:
        return _select(self.build, read.root, read.path)

    def _write_body(self) -> None:
        for position, node in enumerate(self.last):
            if position in self.loop.writes:
                continue
            inputs = [self._read(operand) for operand in self.loop.operands[position]]
            twin = Node(node.op, inputs, node.attrs, node.origin)
            self.body.insert(twin, [v.type for v in node.outputs], None, [v.name for v in node.outputs])
            self.results.update({(position, value.index): value for value in twin.outputs})

    def _read(self, operand: Operand) -> Any:
        if isinstance(operand, Literal):
            return operand.item
        if isinstance(operand, Inner):
            return self._select_inner(operand)
        if isinstance(operand, OuterRead) and operand not in self.inputs:
            return operand.root
        value = self.inputs[_without_selections(operand)]
        return _select(self.inside, value, operand.after) if isinstance(operand, ScannedRow) else value

    def _select_inner(self, operand: Inner | Carried) -> Value:
        return _select(self.inside, self.results[operand.node, operand.index], operand.path)

    # The results

    def _list_collected(self) -> list[tuple[int, int]]:
        """Return the results that something reads after the loop, by node and output; a written tensor counts too."""
        carried = {(c.node, c.index) for c in self.loop.carried if not c.path}
        found: list[tuple[int, int]] = []
        for position in range(len(self.last)):
            for index in range(len(self.last[position].outputs)):
                values = [nodes[position].outputs[index] for nodes in self.loop.iterations]
                is_last_carried = (position, index) in carried
                read = values[:-1] if is_last_carried else values
                if any(self._is_read_outside(value) for value in read):
                    found.append((position, index))
        return found

    def _is_read_outside(self, value: Value) -> bool:
        stack = [value]
        while stack:
            for use in stack.pop().uses:
                if not isinstance(use.user, Node):
                    return True
                if use.user.op_type == "select":
                    stack.extend(use.user.outputs)
                elif use.user not in self.own:
                    return True
        return False

    def _read_collected(self, key: tuple[int, int]) -> Value:
        position = key[0]
        if position not in self.loop.writes:
            return self.results[key]
        return self._read(self.loop.operands[position][1])

    def _replace_carried(self, node: Node, carried: Sequence[Carried]) -> None:
        for state, value in zip(carried, node.outputs, strict=False):
            if not state.path:
                substitute(self.graph, self.last[state.node].outputs[state.index], value)

    def _replace_collected(self, key: tuple[int, int], rows: Value) -> None:
        position, index = key
        if position in self.loop.writes:
            substitute(self.graph, self.last[position].outputs[index], self._write_rows(position, rows))
            return
        for k, nodes in enumerate(self.loop.iterations):
            value = nodes[position].outputs[index]
            if self._is_read_outside(value):
                substitute(self.graph, value, self.build("select", rows, dim=0, index=k))

    def _write_rows(self, position: int, rows: Value) -> Value:
        """Return a preallocated tensor with the rows that the loop writes."""
        buffer, index = self.loop.operands[position][0], self.loop.writes[position]
        assert isinstance(buffer, Carried)
        old = self._read_outer(buffer.initial)
        dim = self.last[position].attrs["dim"] % old.type.rank
        if index.step < 0:
            rows = self.build("flip", rows, dims=(0,))
        written = _move_to(self.build, rows, dim)
        if written.type.shape[dim] == old.type.shape[dim]:
            return written
        low = min(index.start, index.start + index.step * (self.loop.count - 1))
        step = abs(index.step)
        end = low + step * (self.loop.count - 1) + 1
        return self.build("slice_scatter", old, written, dim=dim, start=low, end=end, step=step)

    # Nodes between the iterations

    def _find_later_nodes(self) -> list[Node]:
        """Return the nodes between the iterations that read their results, in order."""
        later: set[Value] = {value for node in self.own for value in node.outputs}
        found: list[Node] = []
        for node in self.between:
            if any(isinstance(v, Value) and v in later for v in node.inputs):
                later.update(node.outputs)
                found.append(node)
        return found

    def _move(self, node: Node) -> None:
        """Insert a copy of a node after the loop, for all readers.

        Raises:
            MismatchError: the node has bodies.
        """
        if node.bodies:
            raise MismatchError(
                f"a loop over positions contains {node.op_type} in {node.origin}, which differs "
                "between its iterations. Make each iteration compute the same"
            )
        twin = Node(node.op, node.inputs, node.attrs, node.origin, node.bodies)
        names = [v.name for v in node.outputs]
        self.graph.insert(twin, [v.type for v in node.outputs], self.build.before, names)
        for old, new in zip(node.outputs, twin.outputs, strict=True):
            substitute(self.graph, old, new)


def _without_selections(operand: Any) -> Any:
    """Return a row without the selections that follow it, and other operands as they are."""
    return replace(operand, after=()) if isinstance(operand, ScannedRow) else operand


# Normal forms


@rule("unbind")
def _unbind_to_selects(node: Node, build: Builder) -> Any:
    """Rows by `unbind` become selections."""
    return tuple(build("select", node.inputs[0], dim=node.attrs["dim"], index=v.index) for v in node.outputs)


@rule("split_with_sizes")
def _split_to_selects(node: Node, build: Builder) -> Any:
    """Pieces of a single row become selections."""
    dim = node.attrs["dim"]
    if any(size != 1 for size in node.attrs["split_sizes"]):
        return Skip("its pieces have several rows")
    rows = [build("select", node.inputs[0], dim=dim, index=v.index) for v in node.outputs]
    return tuple(build("unsqueeze", row, dim=dim % node.inputs[0].type.rank) for row in rows)


@rule("slice")
def _slice_to_select(node: Node, build: Builder) -> Any:
    """A slice of all elements is its operand, and a slice of a single row becomes a selection."""
    x = node.inputs[0]
    if node.output.type == x.type and node.attrs["step"] == 1:
        return x
    dim, start = node.attrs["dim"] % x.type.rank, node.attrs["start"] or 0
    size = x.type.shape[dim]
    if node.output.type.shape[dim] != 1 or not isinstance(size, int) or not isinstance(start, int):
        return Skip("it has several rows")
    row = build("select", x, dim=dim, index=start if start >= 0 else max(start + size, 0))
    return build("unsqueeze", row, dim=dim)


@rule("slice_scatter")
def _whole_write_to_source(node: Node, _build: Builder) -> Any:
    """A write to all elements is the new tensor."""
    x, source = node.inputs
    return source if source.type == x.type and node.attrs["step"] == 1 else Skip("it writes to some elements")


@rule("cat")
def _merge_cats(node: Node, build: Builder) -> Any:
    """Tensors that a loop appends to a growing one are joined once."""
    first = node.inputs[0].producer
    rank = node.output.type.rank
    if first is None or first.op_type != "cat" or first.output.use_count != 1:
        return Skip("it joins no joined tensor")
    if first.attrs["dim"] % rank != node.attrs["dim"] % rank or first.output.type.dtype != node.output.type.dtype:
        return Skip("it joins another dim or dtype")
    return build("cat", *first.inputs, *node.inputs[1:], dim=node.attrs["dim"])


NORMAL_FORMS: Sequence[Rule] = (
    _unbind_to_selects,
    _split_to_selects,
    _slice_to_select,
    _whole_write_to_source,
    _merge_cats,
)
"""Rules that write the same computation of different iterations in the same form."""


def _merge_repeated_calls(graph: Graph, minimum: int) -> None:
    """Merge equal calls that do not depend on the iteration, if there is at least one for each iteration.

    These are views of one tensor, and computations on parameters.
    """
    groups: dict[Any, list[Node]] = {}
    for node in graph.nodes:
        reads_constants = bool(node.inputs) and not any(isinstance(v, Value) and not v.is_constant for v in node.inputs)
        if not node.bodies and not node.is_random and (node.op_type in VIEWS or reads_constants):
            key = (node.op_type, node.inputs, str(node.attrs), tuple(v.type for v in node.outputs))
            groups.setdefault(key, []).append(node)
    for first, *others in groups.values():
        if len(others) + 1 >= minimum:
            for node in others:
                if not any(use.user is graph for value in node.outputs for use in value.uses):
                    for old, new in zip(node.outputs, first.outputs, strict=True):
                        graph.replace(old, new)
                    graph.erase(node)


# Rows that are joined again


@rule("stack", "cat")
def _join_rows(node: Node, build: Builder) -> Any:
    """Rows that a loop collects in a list are joined by reading the tensor of all rows."""
    is_stack, rank = node.op_type == "stack", node.output.type.rank
    dim = node.attrs["dim"] % rank
    runs = list(_split_runs([resolve_read(v) for v in node.inputs], node.inputs))
    if not any(isinstance(run, ScannedRow) for run in runs):
        return Skip("it joins no rows of one tensor")
    pieces: list[Value] = []
    for run in runs:
        if isinstance(run, Value):
            pieces.append(build("unsqueeze", run, dim=dim) if is_stack else run)
            continue
        rows = _select(build, _take_rows(build, run), [(d + 1, index) for d, index in run.after])
        rows = _move_to(build, rows, dim)
        if not is_stack:
            shape = rows.type.shape
            rows = build("reshape", rows, shape=(*shape[:dim], shape[dim] * shape[dim + 1], *shape[dim + 2 :]))
        pieces.append(rows)
    return pieces[0] if len(pieces) == 1 else build("cat", *pieces, dim=dim)


def _split_runs(reads: Sequence[OuterRead], values: Sequence[Value]) -> Iterator[ScannedRow | Value]:
    """Yield successive rows of a scan's result among some tensors as one `ScannedRow`, and the other tensors."""
    position = 0
    while position < len(reads):
        length = _count_successive(reads[position:])
        if length < MIN_JOINED_ROWS:
            yield values[position]
            position += 1
            continue
        read, (_, second) = reads[position], reads[position + 1].path[0]
        (_, start), *after = read.path
        yield ScannedRow(read.root, (), 0, start, second - start, tuple(after), length)
        position += length


def _list_dims(read: OuterRead) -> list[int]:
    return [dim for dim, _ in read.path]


def _count_successive(reads: Sequence[OuterRead]) -> int:
    """Return how many of the first reads are successive rows of one result of a scan, in either direction."""
    first = reads[0]
    producer = first.root.producer
    if producer is None or producer.op_type != "scan" or not first.path or first.path[0][0] != 0:
        return 0
    step = None
    for count, (a, b) in enumerate(itertools.pairwise(reads), 1):
        if b.root is not first.root or _list_dims(b) != _list_dims(first) or b.path[1:] != first.path[1:]:
            return count
        distance = b.path[0][1] - a.path[0][1]
        if distance not in (-1, 1) or step not in (None, distance):
            return count
        step = distance
    return len(reads)


JOINS: Sequence[Rule] = (_join_rows,)
"""Rules that read the results of a scan as a whole."""


def _take_rows(build: Builder, row: ScannedRow) -> Value:
    """Return the rows that the iterations read, along dim 0, in their order."""
    x = _select(build, row.root, row.before)
    if row.dim:
        x = build("permute", x, dims=(row.dim, *(d for d in range(x.type.rank) if d != row.dim)))
    last = row.start + row.step * (row.count - 1)
    low, high = min(row.start, last), max(row.start, last) + 1
    if (low, high, abs(row.step)) != (0, x.type.shape[0], 1):
        x = build("slice", x, dim=0, start=low, end=high, step=abs(row.step))
    return build("flip", x, dims=(0,)) if row.step < 0 else x


def _move_to(build: Builder, x: Value, dim: int) -> Value:
    """Move dim 0 of a tensor to another position."""
    rest = list(range(1, x.type.rank))
    return build("permute", x, dims=(*rest[:dim], 0, *rest[dim:])) if dim else x


def _select(build: Builder, x: Value, path: Iterable[tuple[int, int]]) -> Value:
    for dim, index in path:
        x = build("select", x, dim=dim, index=index)
    return x
