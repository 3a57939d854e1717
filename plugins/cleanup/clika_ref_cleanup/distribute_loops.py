"""Split loops over positions: compute all that does not depend on the state at once, and recognize recurrent layers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, ClassVar

import sympy
import torch

from clika_ref.core.accuracy import COMPOSE
from clika_ref.core.inference import Builder
from clika_ref.core.ir import Graph, Node, Value
from clika_ref.core.operators import Operator
from clika_ref.core.rewriter import substitute
from clika_ref.core.symbols import SymbolSource, is_symbolic
from clika_ref.core.types import TensorType
from clika_ref_cleanup import distribute_loops_motifs as loops
from clika_ref_cleanup.cleanup_pass import CleanupPass
from clika_ref_cleanup.linear_recurrences import LinearForms
from clika_ref_cleanup.loop_structure import CELLS, LoopPart, LoopStructure, PartKind
from clika_ref_cleanup.vectorize import IterationValues, align, repeat, vectorize


class DistributeLoops(CleanupPass):
    """Compute parts of a ``scan`` for all rows at once, and replace cells and linear recurrences by their layers.

    A part of the body that does not depend on a carried value is computed along a new dim, and so is one that no
    carried value depends on. A cell becomes its recurrent layer, and an elementwise ``h = a * h + b`` becomes
    `linear_recurrence`. The other nodes stay in a smaller loop.

    Source: Kennedy and Allen, Optimizing Compilers for Modern Architectures (2001), loop distribution
    """

    name = "distribute-loops"
    after = ("merge-common-subexpressions", "remove-identities", "remove-dropout")
    error = COMPOSE
    may_grow = True
    motifs: ClassVar[tuple[Callable[[Builder], tuple[Value, Value]], ...]] = (
        loops.linear_recurrence,
        loops.nonlinear_recurrence,
    )

    def __call__(self, graph: Graph, operators: Mapping[str, Operator], /) -> None:
        """Split each loop whose body has parts to compute at once."""
        for node in list(graph.nodes):
            if node.op_type == "scan" and _is_supported(graph, node):
                structure = LoopStructure(node)
                if structure.is_divisible:
                    _LoopDistribution(graph, operators, structure).run()


def _is_supported(graph: Graph, node: Node) -> bool:
    """Whether the rows are tensors, and the body uses only sizes of the graph."""
    body, rows = node.bodies[0], node.inputs[: node.attrs["carried"] + node.attrs["scanned"]]
    return all(isinstance(v, Value) for v in rows) and body.symbols.keys() <= graph.symbols.keys()


class _LoopDistribution:
    """Replaces one loop by its parts."""

    def __init__(self, graph: Graph, operators: Mapping[str, Operator], structure: LoopStructure) -> None:
        self.graph = graph
        self.operators = operators
        self.structure = structure
        self.node, self.body = structure.node, structure.body
        self.build = Builder(graph, operators, self.node, self.node.origin.with_rule(DistributeLoops.name))
        first_rows = self.node.inputs[structure.carried]
        self.count = first_rows.type.shape[0]
        self.batches: dict[Value, IterationValues] = {}
        """The values of the body for all iterations."""
        self.final: dict[int, Value] = {}
        """The last value of each carried state, if a layer returns it."""
        for i, (value, operand) in enumerate(zip(self.body.inputs, self.node.inputs, strict=True)):
            if i >= structure.carried:
                self.batches[value] = IterationValues(operand, i < structure.carried + structure.scanned)

    def run(self) -> None:
        """Add the parts in order, make all readers read them, and erase the loop."""
        for part in self.structure.parts:
            self._add_part(part)
        results = [self._find_final(i) for i in range(self.structure.carried)]
        results += [self._repeat(value) for value in self.body.outputs[self.structure.carried :]]
        for old, new in zip(self.node.outputs, results, strict=True):
            if new is not None:
                substitute(self.graph, old, new)
        self.graph.erase(self.node)

    def _add_part(self, part: LoopPart) -> None:
        match part.kind:
            case PartKind.CELL:
                self._add_layer(part.nodes[0])
            case PartKind.LINEAR:
                self._add_recurrence(part)
            case PartKind.SCAN:
                _ResidualLoop(self, part).add()
            case _:
                self._add_vectorized(part.nodes[0])

    # Values for all iterations

    def read(self, item: Any) -> IterationValues:
        """Return an operand of the body for all iterations."""
        if not isinstance(item, Value) or item.is_constant:
            return IterationValues(item, varies=False)
        if item not in self.batches:
            position = self.body.inputs.index(item)
            self.batches[item] = IterationValues(self._shift(position), varies=True)
        return self.batches[item]

    def _shift(self, position: int) -> Value:
        """Return the states before each iteration: the initial one, and all but the last of those after."""
        states = self._join_states(position)
        type_ = TensorType(states.type.dtype, (self.count, *states.type.shape[1:]))
        return self.build("slice", states, dim=0, start=0, end=self.count, types=[type_])

    def _join_states(self, position: int) -> Value:
        """Return the initial state, followed by those after each iteration."""
        rows = self._repeat(self.body.outputs[position])
        first = self.build("unsqueeze", self.node.inputs[position], dim=0)
        types = [TensorType(rows.type.dtype, (self.count + 1, *rows.type.shape[1:]))]
        return self.build("cat", first, rows, dim=0, types=types)

    def _repeat(self, value: Value) -> Value:
        return repeat(self.build, self.read(value), self.count)

    def _find_final(self, position: int) -> Value | None:
        """Return the last value of a carried state; None if nothing reads it."""
        if not self.node.outputs[position].use_count:
            return None
        if position in self.final:
            return self.final[position]
        batch = self.read(self.body.outputs[position])
        if is_symbolic(self.count) and not isinstance(self.count, sympy.Symbol):  # there may be no iteration
            rows = self._join_states(position)
        elif batch.varies:
            rows = batch.item
        else:
            return batch.item
        return self.build("select", rows, dim=0, index=-1)

    def _add_vectorized(self, node: Node) -> None:
        operands = [self.read(item) for item in node.inputs]
        build = _with_origin(self.build, node)
        if not any(batch.varies for batch in operands):
            made = build(
                node.op, *(batch.item for batch in operands), types=[v.type for v in node.outputs], **node.attrs
            )
            results, varies = made if isinstance(made, tuple) else (made,), False
        else:
            results, varies = vectorize(build, node, operands, self.count), True
        for old, new in zip(node.outputs, results, strict=True):
            self.batches[old] = IterationValues(new, varies)

    # Layers

    def _add_layer(self, node: Node) -> None:
        """Replace a cell by its layer."""
        layer, states = CELLS[node.op_type], len(node.outputs)
        x, *initial, w_ih, w_hh, b_ih, b_hh = node.inputs
        build = _with_origin(self.build, node)
        positions = [self.body.inputs.index(value) for value in initial]
        before = [build("unsqueeze", self.node.inputs[i], dim=0) for i in positions]
        parameters = [self.read(p).item for p in (w_ih, w_hh, b_ih, b_hh) if p is not None]
        options = {"num_layers": 1, "bidirectional": False, "batch_first": False, "has_biases": b_ih is not None}
        rows, *last = build(layer, self._repeat(x), *before, *parameters, **options)
        self.batches[node.outputs[0]] = IterationValues(rows, varies=True)
        for position, value in zip(positions, last[:states], strict=True):
            if self.node.outputs[position].use_count:
                self.final[position] = build("squeeze", value, dims=(0,))

    def _add_recurrence(self, part: LoopPart) -> None:
        """Replace an elementwise recurrence; further nodes of its part are computed from all states."""
        (position,) = part.states
        state, result = self.body.inputs[position], self.body.outputs[position]
        build = _with_origin(self.build, part.nodes[0])
        forms = LinearForms(build, state, self.read)
        for node in part.nodes:
            forms.add(node)
        form = forms.forms[result]
        factor = self._to_rows(build, form.factor, state.type)
        term = self._to_rows(build, form.term, state.type)
        rows = TensorType(state.type.dtype, (self.count, *state.type.shape))
        if term.type != rows:
            term = build("expand", term, size=rows.shape, types=[rows])
        self.batches[result] = IterationValues(
            build("linear_recurrence", factor, term, self.node.inputs[position]), varies=True
        )
        read_elsewhere = self.structure.list_read_outside(part)
        for node in part.nodes:
            if node.output in read_elsewhere and node.output is not result:
                self._add_vectorized_with_operands(node)

    def _add_vectorized_with_operands(self, node: Node) -> None:
        for item in node.inputs:
            producer = item.producer if isinstance(item, Value) and not item.is_constant else None
            if producer is not None and item not in self.batches:
                self._add_vectorized_with_operands(producer)
        self._add_vectorized(node)

    def _to_rows(self, build: Builder, batch: IterationValues, type: TensorType) -> Value:
        """Return a form as a tensor with the rank of all states; dim 0 is 1 if it is the same in all iterations."""
        if not isinstance(batch.item, Value):
            return build("full", size=(1,) * (type.rank + 1), fill_value=float(batch.item), dtype=type.dtype)
        if batch.varies:
            return align(build, batch, type.rank)
        shape = batch.item.type.shape
        return build("reshape", batch.item, shape=(1,) * (type.rank + 1 - len(shape)) + tuple(shape))


def _with_origin(build: Builder, node: Node) -> Builder:
    """Return a builder at the same place, for nodes that replace one of the body."""
    return Builder(build.graph, build.operators, build.before, node.origin.with_rule(DistributeLoops.name))


class _ResidualLoop:
    """Adds a loop with the nodes that no other part computes."""

    def __init__(self, whole: _LoopDistribution, part: LoopPart) -> None:
        self.whole = whole
        self.part = part
        self.old = whole.body
        self.states = [self.old.inputs[i] for i in part.states]
        self.body = whole.graph.new_body(self.old.name)
        self.mapping: dict[Value, Value] = {v: v for v in whole.graph.constants.values()}

    def add(self) -> None:
        """Insert the loop, and record its results."""
        whole, part = self.whole, self.part
        read = {value: whole.read(value) for value in self._list_outer_reads()}
        rows = [value for value, batch in read.items() if batch.varies]
        others = [value for value, batch in read.items() if not batch.varies]
        operands = [whole.node.inputs[i] for i in part.states]
        if not rows:  # the loop only counts
            operands.append(whole.build("arange", end=whole.count, dtype=torch.int64))
        operands += [read[value].item for value in (*rows, *others)]
        for value in self.states:
            self._add_input(value)
        if not rows:
            self.body.add_input(TensorType(torch.int64, ()), "position")
        for value in (*rows, *others):
            self._add_input(value)
        for node in part.nodes:
            self.body.insert_copy(node, self.mapping)
        operands += self._declare_symbols()
        collected = self._list_collected()
        for value in (*(self.old.outputs[i] for i in part.states), *collected):
            self.body.add_output(self.mapping[value])
        carried = len(part.states)
        types = [v.type for v in self.body.outputs[:carried]]
        types += [TensorType(v.type.dtype, (whole.count, *v.type.shape)) for v in self.body.outputs[carried:]]
        attrs = {"carried": carried, "scanned": max(len(rows), 1)}
        made = Node(whole.node.op, operands, attrs, whole.node.origin, [self.body])
        whole.graph.insert(made, types, whole.node, [whole.node.name] * len(types))
        whole.final.update(zip(part.states, made.outputs, strict=False))
        whole.batches.update(
            zip(collected, (IterationValues(v, varies=True) for v in made.outputs[carried:]), strict=True)
        )

    def _add_input(self, value: Value) -> None:
        self.mapping[value] = self.body.add_input(value.type, value.name)

    def _list_outer_reads(self) -> list[Value]:
        """Return the values that the nodes read from other parts, and inputs of the old body."""
        own = {value for node in self.part.nodes for value in node.outputs}
        read = [v for node in self.part.nodes for v in node.inputs if isinstance(v, Value) and not v.is_constant]
        return list(dict.fromkeys(v for v in read if v not in own and v not in self.states))

    def _list_collected(self) -> list[Value]:
        """Return the results that other parts read, also as the state before a row, or that the old loop returns."""
        structure = self.whole.structure
        read = structure.list_read_outside(self.part)
        own = {*self.part.nodes}
        carried = {
            self.old.outputs[i] for i in self.part.states if all(use.user in own for use in self.old.inputs[i].uses)
        }
        needed = {use for value in carried for use in value.uses if isinstance(use.position, int)}
        found: list[Value] = []
        for value in (v for node in self.part.nodes for v in node.outputs):
            if value not in read:
                continue
            only_state = value in carried and all(
                use in needed and use.user is self.old and use.position in self.part.states for use in value.uses
            )
            if not only_state:
                found.append(value)
        return found

    def _declare_symbols(self) -> list[Any]:
        """Declare the symbols that the old body declares; return those that no input shows, which become operands."""
        passed: list[Any] = []
        for symbol in self.old.symbols.values():
            dims = ((v.name, d) for v in self.body.inputs for d, size in enumerate(v.type.shape) if size == symbol.expr)
            found = next(dims, None)
            if found is None:
                value = self.body.add_input(TensorType(torch.int64, ()), symbol.name)
                source = SymbolSource(value.name, None, holds_length=bool(symbol.expr.is_nonnegative))
                passed.append(symbol.expr)
            else:
                source = SymbolSource(*found)
            self.body.symbols[symbol.name] = replace(symbol, source=source)
        return passed
