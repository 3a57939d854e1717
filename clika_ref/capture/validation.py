"""A traced graph held against eager: sides must have stayed dynamic, guards must hold, and numbers must agree."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import sympy
import torch

from clika_ref.capture.dimensions import InputSide, resized
from clika_ref.capture.eager import run_eager
from clika_ref.capture.examples import TracedCalls
from clika_ref.capture.memory import trimmed
from clika_ref.capture.messages import MismatchError, PathError
from clika_ref.capture.program import TracedGraph
from clika_ref.capture.symbols import TracedGuard
from clika_ref.comparison import differences
from clika_ref.core.errors import ModelError
from clika_ref.core.execution import interpret, read_sizes
from clika_ref.core.symbols import evaluate
from clika_ref.input_checks import check_inputs

PROBES = 8
"""Extra eager runs at most, to find out whether a guard matters."""


class Validation:
    """Checks one traced graph against all tracing inputs."""

    def __init__(self, traced: TracedCalls, result: TracedGraph, leaves: list[Any]) -> None:
        self.traced = traced
        self.result = result
        self.leaves = leaves
        self.deterministic = not any(node.is_random for node in result.graph.nodes)
        self.notes: list[str] = []

    def run(self) -> list[str]:
        """Check everything; drop guards that turn out not to matter. Return what was noticed.

        Raises:
            MismatchError: the graph does not serve all inputs.
        """
        self._require_dynamic_sides()
        sizes = [self._sizes(call) for call in self.traced.comparison.calls]
        self._require_guards(sizes)
        excused = [g for g in self.result.guards if g.testable and not all(_holds(g, s) for s in sizes)]
        for number, (call, expected) in enumerate(
            zip(self.traced.comparison.calls, self.traced.expected, strict=True), 1
        ):
            problem = self._disagreement(call, expected[0])
            if problem is not None:
                for g in excused:
                    self._require_guard(g, sizes)
                msg = f"the traced graph disagrees with eager on input {number}: {problem}"
                raise MismatchError(msg)
        for g in excused:
            self._drop(g)
        self._probe()
        self._require_fit()
        self._note_examples()
        return self.notes

    def _require_fit(self) -> None:
        """Check the tracing inputs as the compiled module will check its inputs."""
        self.result.graph.guards = [g.guard for g in self.result.guards]
        for number, call in enumerate(self.traced.comparison.calls, 1):
            try:
                check_inputs(self.result.graph, self.result.signature.graph_inputs(call))
            except ModelError as error:
                msg = f"the traced graph does not take input {number}: {error}"
                raise MismatchError(msg) from error

    def _note_examples(self) -> None:
        sizes = self._sizes(self.leaves)
        symbols = self.result.graph.symbols
        symbols.update({n: replace(s, example=sizes[n]) for n, s in symbols.items() if n in sizes})

    def _drop(self, g: TracedGuard) -> None:
        self.result.guards.remove(g)
        self.notes.append(f"Dropped a guard, as eager agrees where it does not hold: {g.guard}")

    def _sizes(self, leaves: list[Any]) -> Mapping[str, int]:
        return read_sizes(self.result.graph, self.result.signature.graph_inputs(leaves))

    def _require_dynamic_sides(self) -> None:
        inputs = {v.name: v for v in self.result.graph.inputs}
        for side in self.traced.comparison.lengths:
            value = inputs.get(self.traced.comparison.names[side.leaf])
            fixed = value.type.shape[side.dim] if value is not None and side.dim is not None else None
            if value is None or isinstance(fixed, int):
                label = self.traced.comparison.label(side)
                given = ", ".join(map(str, dict.fromkeys(self.traced.comparison.lengths[side])))
                why = self._guards_on(side)
                msg = f"{label} takes the lengths {given} among the inputs, but the model fixes it{why}"
                raise MismatchError(msg)

    def _guards_on(self, side: InputSide) -> str:
        name = self.traced.comparison.names[side.leaf]
        for symbol in self.result.graph.symbols.values():
            if symbol.side.name == name and symbol.side.dim == side.dim:
                found = [g.guard for g in self.result.guards if symbol.expr in g.guard.relation.free_symbols]
                return f": {'; '.join(map(str, found))}" if found else ""
        return ""

    def _require_guards(self, sizes: list[Mapping[str, int]]) -> None:
        for g in self.result.guards:
            if not g.testable:
                self._require_guard(g, sizes)

    def _require_guard(self, g: TracedGuard, sizes: list[Mapping[str, int]]) -> None:
        holding = [i for i, s in enumerate(sizes, 1) if _holds(g, s)]
        broken = [i for i in range(1, len(sizes) + 1) if i not in holding]
        if broken:
            shown = self._named_sizes(g, sizes[broken[0] - 1])
            msg = (
                f"the model takes another path for input {broken[0]} ({shown}): the graph holds only where "
                f"{g.guard}. {_listed(holding).capitalize()} would share a graph, {_listed(broken)} another; "
                "compile once for each group"
            )
            # An equality may come of int(size), which fixes a size for one tracer and not for another.
            branches = not g.testable and not isinstance(g.guard.relation, sympy.Equality)
            raise (PathError if branches else MismatchError)(msg)

    def _named_sizes(self, g: TracedGuard, sizes: Mapping[str, int]) -> str:
        used = [s for s in self.result.graph.symbols.values() if s.expr in g.guard.relation.free_symbols]
        return ", ".join(f"{s.name} = {sizes[s.name]}, {s.side}" for s in used)

    def _disagreement(self, leaves: list[Any], expected: list[Any]) -> str | None:
        inputs = self.result.signature.graph_inputs([_own(leaf) for leaf in leaves])
        with trimmed(), torch.random.fork_rng(devices=[]), torch.no_grad():
            outputs, _ = interpret(self.result.graph, inputs)
        sizes = read_sizes(self.result.graph, inputs)
        outputs_of = self.result.signature.outputs
        actual = [evaluate(o.value, sizes) if o.index is None else outputs[o.index] for o in outputs_of]
        if len(actual) != len(expected):
            return f"it returns {len(actual)} values instead of {len(expected)}"
        if not self.deterministic:
            expected = [_shape_of(e) for e in expected]
            actual = [_shape_of(a) for a in actual]
        found = differences(expected, actual)
        return "; ".join(f"output {i + 1} is {text}" for i, text in found.items()) or None

    def _probe(self) -> None:
        """Violate each remaining testable guard once; where eager agrees all the same, drop it."""
        budget = PROBES
        for g in [g for g in self.result.guards if g.testable]:
            for leaves in self._violating(g):
                if budget == 0:
                    return
                budget -= 1
                if self._agrees(leaves):
                    self._drop(g)
                break

    def _violating(self, g: TracedGuard) -> Any:
        base = self._sizes(self.leaves)
        for symbol in self.result.graph.symbols.values():
            if symbol.expr not in g.guard.relation.free_symbols:
                continue
            for length in (1, 2, 3, base.get(symbol.name, 3) + 1):
                sizes = {**base, symbol.name: length}
                others = [o for o in self.result.guards if o is not g and not o.testable]
                if not _holds(g, sizes) and all(_holds(o, sizes) for o in others):
                    side = self._side_of(symbol)
                    if side is not None:
                        yield resized(self.leaves, self._with_equals(side, length))

    def _side_of(self, symbol: Any) -> InputSide | None:
        names = self.traced.comparison.names
        return InputSide(names.index(symbol.side.name), symbol.side.dim) if symbol.side.name in names else None

    def _with_equals(self, side: InputSide, length: int) -> dict[InputSide, int]:
        """Resize all sides that carry the same symbol in the graph together."""
        inputs = {v.name: v for v in self.result.graph.inputs}
        names = self.traced.comparison.names
        if side.dim is None:
            return {side: length}
        wanted = inputs[names[side.leaf]].type.shape[side.dim]
        return {
            s: length
            for s in self.traced.comparison.lengths
            if s.dim is not None and inputs[names[s.leaf]].type.shape[s.dim] == wanted
        }

    def _agrees(self, leaves: list[Any]) -> bool:
        try:
            expected, _ = run_eager(self.traced.callee, self.traced.rebuild(leaves))
            return self._disagreement(leaves, expected) is None
        except Exception:  # noqa: BLE001 - eager refuses such sizes in its own words: then the guard is right
            return False


def _holds(g: TracedGuard, sizes: Mapping[str, int]) -> bool:
    missing = {str(s) for s in g.guard.relation.free_symbols} - sizes.keys()
    return bool(missing) or bool(evaluate(g.guard.relation, sizes))


def _listed(numbers: list[int]) -> str:
    if not numbers:
        return "no input"
    return f"input{'s' if len(numbers) > 1 else ''} {' and '.join(map(str, numbers))}"


def _own(leaf: Any) -> Any:
    return leaf.detach().clone() if isinstance(leaf, torch.Tensor) else leaf


def _shape_of(result: Any) -> Any:
    return (result.dtype, result.shape) if isinstance(result, torch.Tensor) else result
