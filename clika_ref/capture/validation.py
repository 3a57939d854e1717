"""Validate a traced graph against eager: dims must still be dynamic, guards must hold, and results must agree."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

import sympy
import torch

from clika_ref.capture.detections import has_same_detections
from clika_ref.capture.dimensions import InputDim, count_elements, resize_leaves
from clika_ref.capture.eager import EagerRun, run_eager
from clika_ref.capture.inputs_catcher import copy_leaf
from clika_ref.capture.memory_limits import release_freed_memory
from clika_ref.capture.messages import ControlFlowError, FixedSizeError, MismatchError
from clika_ref.capture.program import TracedGraph
from clika_ref.capture.random_inputs import DISTRIBUTION_COUNT, UNSAFE_ON_OTHER_INPUTS, is_informative, redraw
from clika_ref.capture.state import collect_state
from clika_ref.capture.surrounding_autocast import outside_autocast
from clika_ref.capture.symbols import TracedGuard
from clika_ref.capture.traced_calls import TracedCalls
from clika_ref.core.comparison import describe_differences
from clika_ref.core.declared_types import DeclaredTypes
from clika_ref.core.errors import ModelError
from clika_ref.core.execution import interpret, read_sizes
from clika_ref.core.guards import check_inputs, is_met
from clika_ref.core.ir import Graph, Node, walk
from clika_ref.core.symbols import Guard, Symbol, evaluate
from clika_ref.torch_internals.symbols import torch_sympy

MAX_PROBE_RUNS = 8
"""Maximum number of further eager runs to test guards; each run tests all guards that it violates."""

AGREEMENTS_PER_GUARD = 2
"""Number of agreeing runs after which a guard needs no more."""

MAX_PROBED_BOUND = 256
"""Largest upper bound of a size beyond which eager and graph are compared: traced loops are shorter."""

MAX_KEPT_RESULT_BYTES = 64 * 2**20
"""Size limit of the results of eager that are kept for comparisons after the capture."""


@dataclass(frozen=True)
class ProbeRun:
    """The guards that a run violated, and whether eager agreed with the graph anyway."""

    violated: list[TracedGuard]
    agreed: bool
    is_complete: bool
    """Whether each branch of `torch.cond` ran."""


@dataclass
class GuardEvidence:
    """What runs that violate guards show about them."""

    runs: list[ProbeRun] = field(default_factory=list)

    def is_run_useful(self, violated: list[TracedGuard]) -> bool:
        """Whether a run that violates these guards would give new information about them."""
        disagreed = [run.violated for run in self.runs if not run.agreed]
        if len(self.runs) >= MAX_PROBE_RUNS or violated in disagreed:
            return False
        return any(self._count_agreements(g) < AGREEMENTS_PER_GUARD and [g] not in disagreed for g in violated)

    def idle(self, guards: Iterable[TracedGuard]) -> list[TracedGuard]:
        """Return irrelevant guards: runs violating them agreed, and other guards exclude all runs that disagreed."""
        idle = [g for g in guards if self._count_agreements(g)]
        for run in self.runs:
            if not run.agreed and all(g in idle for g in run.violated):
                idle = [g for g in idle if g not in run.violated]
        return idle

    def _count_agreements(self, g: TracedGuard) -> int:
        runs = [run for run in self.runs if g in run.violated and (run.is_complete or not g.is_from_body)]
        return sum(run.agreed for run in runs)


class Validation:
    """Checks one traced graph against all tracing inputs."""

    def __init__(self, traced: TracedCalls, result: TracedGraph, leaves: list[Any]) -> None:
        self.traced = traced
        self.result = result
        self.leaves = leaves
        self.deterministic = not any(node.is_random for node in walk(result.graph))
        self.notes: list[str] = []
        nodes = [node for node in walk(result.graph) if node.op_type == "cond"]
        self._branches = {body for node in nodes for body in node.bodies}
        self._entered: set[Graph] = set()
        """The branches of `torch.cond` that ran since it was cleared."""
        self.empty_lines: set[str] = set()
        """The lines of calls with a result of no rows in a run that was compared."""

    def run(self) -> list[str]:
        """Check everything, and drop irrelevant guards. Return notes for the log.

        Raises:
            MismatchError: the graph does not serve all inputs.
        """
        self._require_dynamic_dims()
        sizes = [self._sizes(call) for call in self.traced.comparison.calls]
        self._require_guards(sizes)
        excused = [g for g in self._list_excusable() if not all(_is_satisfied(g, s) for s in sizes)]
        for number, (call, expected) in enumerate(
            zip(self.traced.comparison.calls, self.traced.expected, strict=True), 1
        ):
            problem = self.find_disagreement(call, expected)
            if problem is not None:
                for g in excused:
                    self._require_guard(g, sizes)
                raise MismatchError(f"the traced graph disagrees with eager on input {number}: {problem}")
        self._require_excused_agree(excused, sizes)
        for g in excused:
            self._drop(g)
        self._probe()
        self._require_accepted_inputs()
        self._note_examples()
        return self.notes

    def _require_accepted_inputs(self) -> None:
        """Check the tracing inputs with the input checks of the compiled module."""
        guards = [g.guard for g in self.result.guards]
        self.result.graph.guards = [g for g in guards if not _is_implied(g, guards)]
        for number, call in enumerate(self.traced.comparison.calls, 1):
            try:
                check_inputs(self.result.graph, self.result.signature.graph_inputs(call))
            except ModelError as error:
                raise MismatchError(f"the traced graph rejects input {number}: {error}") from error

    def _note_examples(self) -> None:
        sizes = self._sizes(self.leaves)
        symbols = self.result.graph.symbols
        guards = self.result.graph.guards
        symbols.update(
            {n: replace(s, example=sizes[n], low=_lower_bound(s, guards)) for n, s in symbols.items() if n in sizes}
        )

    def _drop(self, g: TracedGuard) -> None:
        self.result.guards.remove(g)
        self.notes.append(f"Dropped a guard, since the graph agrees with eager where it does not hold: {g.guard}")

    def _sizes(self, leaves: list[Any]) -> Mapping[str, int]:
        return read_sizes(self.result.graph, self.result.signature.graph_inputs(leaves))

    def _require_dynamic_dims(self) -> None:
        inputs = {v.name: v for v in self.result.graph.inputs}
        for dim in self.traced.comparison.sizes:
            value = inputs.get(self.traced.comparison.names[dim.leaf])
            fixed = value.type.shape[dim.dim] if value is not None and dim.dim is not None else None
            if value is None or isinstance(fixed, int):
                label = self.traced.comparison.label(dim)
                given = ", ".join(map(str, dict.fromkeys(self.traced.comparison.sizes[dim])))
                why = self._guards_on(dim)
                raise MismatchError(f"{label} has the lengths {given} in the inputs, but the model fixes it{why}")

    def _guards_on(self, dim: InputDim) -> str:
        name = self.traced.comparison.names[dim.leaf]
        for symbol in self.result.graph.symbols.values():
            if symbol.source.name == name and symbol.source.dim == dim.dim:
                found = [g.guard for g in self.result.guards if symbol.expr in g.guard.relation.free_symbols]
                return f": {'; '.join(map(str, found))}" if found else ""
        return ""

    def _list_excusable(self) -> list[TracedGuard]:
        """Return the guards that a tracing input may violate, if eager and the graph agree on it."""
        return [g for g in self.result.guards if g.is_testable or g.excludes_small_sizes]

    def _require_guards(self, sizes: list[Mapping[str, int]]) -> None:
        excusable = self._list_excusable()
        for g in self.result.guards:
            if g not in excusable:
                self._require_guard(g, sizes)

    def _require_guard(self, g: TracedGuard, sizes: list[Mapping[str, int]]) -> None:
        holding = [i for i, s in enumerate(sizes, 1) if _is_satisfied(g, s)]
        broken = [i for i in range(1, len(sizes) + 1) if i not in holding]
        if broken:
            shown = self._format_sizes(g, sizes[broken[0] - 1])
            msg = (
                f"the model takes a different branch for input {broken[0]} ({shown}): the graph is valid only if "
                f"{g.guard}. {_list_inputs(holding).capitalize()} would share a graph, {_list_inputs(broken)} "
                "another. Compile once for each group."
            )
            # An equality may come from int(size), which fixes a size for one tracer but not for another.
            branches = not g.is_testable and not isinstance(g.guard.relation, sympy.Equality)
            error = FixedSizeError if _fixes_size(g.guard) else MismatchError
            raise (ControlFlowError if branches else error)(msg)

    def _format_sizes(self, g: TracedGuard, sizes: Mapping[str, int]) -> str:
        used = [s for s in self.result.graph.symbols.values() if s.expr in g.guard.relation.free_symbols]
        return ", ".join(f"{s.name} = {sizes[s.name]}, {s.source}" for s in used)

    def find_disagreement(self, leaves: list[Any], run: EagerRun) -> str | None:
        """Return how the graph disagrees with a run of eager on the same call, None if it agrees."""
        inputs = self.result.signature.graph_inputs([copy_leaf(leaf) for leaf in leaves])
        types, broken = DeclaredTypes(self.result.graph, inputs), list[str]()

        def check_types(node: Node, results: tuple[torch.Tensor, ...]) -> None:
            broken.extend(types.find_mismatches(node, results))
            if node.origin.line and any(0 in x.shape for x in results):
                self.empty_lines.add(node.origin.line)

        with release_freed_memory(), torch.random.fork_rng(devices=[]), torch.no_grad(), outside_autocast():
            outputs, state = interpret(self.result.graph, inputs, check_types, lambda body, _: self._entered.add(body))
        if broken:
            return broken[0]
        sizes = read_sizes(self.result.graph, inputs)
        outputs_of = self.result.signature.outputs
        actual = [evaluate(o.value, sizes) if o.index is None else o.read(outputs) for o in outputs_of]
        if len(actual) != len(run.leaves):
            return f"the graph returns {len(actual)} values instead of {len(run.leaves)}"
        labels = [f"output {i}" for i in range(1, len(actual) + 1)]
        after = self._state_after(state, run.state)
        expected, actual = [*run.leaves, *(e for e, _ in after.values())], [*actual, *(a for _, a in after.values())]
        if not self.deterministic:
            expected = [_shape_of(e) for e in expected]
            actual = [_shape_of(a) for a in actual]
        labels += [f"{name} after the call" for name in after]
        found = describe_differences(expected, actual)
        if found and max(found) < len(outputs_of) and self._has_same_detections(run.leaves, outputs):
            return None
        return "; ".join(f"{labels[i]} is {text}" for i, text in found.items()) or None

    def _has_same_detections(self, leaves: list[Any], outputs: Sequence[torch.Tensor]) -> bool:
        """Whether the outputs of the graph are those of eager in another order of equal scores."""
        positions = [leaf.index for leaf in self.result.signature.outputs]
        if positions != list(range(len(outputs))):
            return False
        return has_same_detections(self.result.graph, leaves, outputs)

    def _state_after(
        self, graph_state: Mapping[str, torch.Tensor], eager_state: Mapping[str, torch.Tensor]
    ) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
        """Return the values that eager and the graph leave in each parameter and buffer that either writes to."""
        aliases = self.result.graph.aliases
        return {
            name: (eager_state.get(name, old), graph_state.get(aliases.get(name, name), old))
            for name, old in collect_state(self.traced.callee.module).items()
            if old is not None and (name in eager_state or aliases.get(name, name) in graph_state)
        }

    def _require_excused_agree(self, excused: list[TracedGuard], sizes: list[Mapping[str, int]]) -> None:
        """Check that eager agrees for inputs that violate guards.

        Values are drawn again if they are uninformative, such as zeros, or if the model itself branches.
        """
        for call, size in zip(self.traced.comparison.calls, sizes, strict=True):
            violated = [g for g in excused if not _is_satisfied(g, size)]
            is_branch = any(not g.is_testable for g in violated)
            if violated and (is_branch or not is_informative(call)) and not self.agrees_on(call):
                self._require_guard(violated[0], sizes)

    def _probe(self) -> None:
        """Run eager on sizes that violate the remaining testable guards, many at once; drop guards if it agrees."""
        if any(node.op_type in UNSAFE_ON_OTHER_INPUTS for node in walk(self.result.graph)):
            return
        leaves = self._find_smallest_call()
        base = self._sizes(leaves)
        evidence = GuardEvidence()
        # Test size 0 separately, as empty tensors compare nothing; negative values are tested for numbers only.
        for lengths in ((1, 2, 3, None), (0,), (-1, -4)):
            for length, symbols in product(lengths, self._group_symbols()):
                size = self._next_size(symbols[0], base) if length is None else length
                if size >= 0 or all(s.source.dim is None for s in symbols):
                    self._run_at(leaves, symbols, size, evidence)
            self._drop_idle(evidence)
        every = [s for s in self.result.graph.symbols.values() if self._dim_of(s) is not None]
        self._run_at(leaves, every, 1, evidence)  # violates guards on products of sizes
        self._drop_idle(evidence)

    def _drop_idle(self, evidence: GuardEvidence) -> None:
        for g in evidence.idle(g for g in self.result.guards if g.is_testable):
            self._drop(g)

    def _next_size(self, symbol: Symbol, base: Mapping[str, int]) -> int:
        """Return a size that no other run has: beyond the traced lengths of a loop, which is an upper bound.

        Far larger bounds are limits of operators, such as the 16 million elements of a quantile.
        """
        bounds = [_find_upper_bound(g.guard, symbol) for g in self.result.guards]
        bound = max((bound for bound in bounds if bound <= MAX_PROBED_BOUND), default=0)
        return max(3 * bound, base.get(symbol.name, 3)) + 1

    def _group_symbols(self) -> list[list[Symbol]]:
        """Return groups of symbols with equal sizes in all inputs, as a model may need that, then each symbol alone."""
        dims = {s.name: self._dim_of(s) for s in self.result.graph.symbols.values()}
        symbols = [s for s in self.result.graph.symbols.values() if dims[s.name] is not None]
        groups = [[s for s in symbols if dims[s.name] in group] for group in self.traced.comparison.groups]
        return [*(group for group in groups if len(group) > 1), *([s] for s in symbols)]

    def _run_at(self, leaves: list[Any], symbols: list[Symbol], length: int, evidence: GuardEvidence) -> None:
        """Compare the graph with eager at another size of some dims, if that gives new information about the guards."""
        sizes = {**self._sizes(leaves), **{s.name: length for s in symbols}}
        violated = [g for g in self.result.guards if not _is_satisfied(g, sizes)]
        if not all(g.is_testable for g in violated) or (length == 0 and len(violated) > len(symbols)):
            return
        if evidence.is_run_useful(violated):
            dims = [dim for s in symbols if (dim := self._dim_of(s)) is not None]
            changes = {s: size for dim in dims for s, size in self._resize_equal_dims(dim, length).items()}
            self._entered.clear()
            agreed = self.agrees_on(resize_leaves(leaves, changes))
            evidence.runs.append(ProbeRun(violated, agreed, self._entered >= self._branches))

    def _find_smallest_call(self) -> list[Any]:
        """Return the smallest call, the cheapest to run, among those with dims that can be resized."""
        dims, calls = self.traced.comparison.sizes, self.traced.comparison.calls
        usable = [c for i, c in enumerate(calls) if all(lengths[i] >= 2 for lengths in dims.values())]
        return min([self.leaves, *usable], key=count_elements)

    def _dim_of(self, symbol: Any) -> InputDim | None:
        names = self.traced.comparison.names
        return InputDim(names.index(symbol.source.name), symbol.source.dim) if symbol.source.name in names else None

    def _resize_equal_dims(self, dim: InputDim, length: int) -> dict[InputDim, int]:
        """Resize all dims that have the same size expression in the graph together."""
        inputs = {v.name: v for v in self.result.graph.inputs}
        names = self.traced.comparison.names
        if dim.dim is None:
            return {dim: length}
        size = inputs[names[dim.leaf]].type.shape[dim.dim]
        return {
            s: length
            for s in self.traced.comparison.sizes
            if s.dim is not None and inputs[names[s.leaf]].type.shape[s.dim] == size
        }

    def agrees_at_size_one(self) -> bool:
        """Whether graph and eager agree with all dynamic dims of size 1, as far as the graph accepts that."""
        leaves = self._find_smallest_call()
        for symbols in self._group_symbols():
            dims = [dim for s in symbols if (dim := self._dim_of(s)) is not None]
            changes = {s: size for dim in dims for s, size in self._resize_equal_dims(dim, 1).items()}
            smaller = resize_leaves(leaves, changes)
            if all(_is_satisfied(g, self._sizes(smaller)) for g in self.result.guards):
                leaves = smaller
        return self.agrees_on(leaves)

    def agrees_on(self, leaves: list[Any]) -> bool:
        """Whether graph and eager agree on the shapes of a call, for the first informative random values."""
        verdicts: list[bool | None] = []
        for draw in range(DISTRIBUTION_COUNT):
            verdicts.append(self._compare_random_call(leaves, draw))
            if verdicts[-1] is False:
                return False
            if True in verdicts and self._entered >= self._branches:
                break
        if set(verdicts) == {None} and is_informative(leaves):  # it accepts no random values, as a Cholesky factor
            verdicts.append(self._compare_call(leaves))
        return True in verdicts

    def _compare_random_call(self, leaves: list[Any], draw: int) -> bool | None:
        """Compare one random call with eager; None if the model accepts none, or returns no finite value."""
        for positions in (True, False):
            drawn = redraw(leaves, draw, positions=positions)
            try:
                expected = run_eager(self.traced.callee, self.traced.rebuild(drawn))
            except Exception:  # noqa: BLE001, S112 - a model may raise anything, such as for an index out of range
                continue
            return self._compare_result(drawn, expected)
        return None

    def _compare_call(self, leaves: list[Any]) -> bool | None:
        """Compare a call with eager; None if the model does not accept it, or returns no finite value."""
        try:
            expected = run_eager(self.traced.callee, self.traced.rebuild([copy_leaf(leaf) for leaf in leaves]))
        except Exception:  # noqa: BLE001 - a model may raise anything
            return None
        return self._compare_result(leaves, expected)

    def _compare_result(self, leaves: list[Any], expected: EagerRun) -> bool | None:
        try:
            agrees = self.find_disagreement(leaves, expected) is None
        except Exception:  # noqa: BLE001 - the graph fails where eager runs, so the guard is needed
            return False
        return None if agrees and _is_all_nonfinite(expected.leaves) else agrees


def _is_all_nonfinite(results: list[Any]) -> bool:
    """Whether the results contain floats, but no finite one: logarithms of negative numbers."""
    floats = [r for r in results if isinstance(r, torch.Tensor) and r.is_floating_point() and r.numel()]
    return bool(floats) and not any(bool(r.isfinite().any()) for r in floats)


def _fixes_size(guard: Guard) -> bool:
    """Whether a guard requires a size of at least 2, which no treatment of sizes 0 and 1 changes."""
    sides = guard.relation.args
    return isinstance(guard.relation, sympy.Equality) and any(isinstance(n, sympy.Integer) and n >= 2 for n in sides)


def _is_satisfied(g: TracedGuard, sizes: Mapping[str, int]) -> bool:
    missing = {str(s) for s in g.guard.relation.free_symbols} - sizes.keys()
    return bool(missing) or is_met(g.guard, sizes)


def _find_upper_bound(g: Guard, symbol: Symbol) -> int:
    """Return the size above which a guard fails: of ``size <= bound``, and of a ``min(size, bound)`` in it; else 0."""
    relation = g.relation
    bounds = [relation.rhs] if isinstance(relation, sympy.Le) and relation.lhs == symbol.expr else []
    for least in relation.atoms(torch_sympy.Min, sympy.Min):
        bounds += least.args if symbol.expr in least.args else ()
    return max((int(bound) for bound in bounds if isinstance(bound, sympy.Integer)), default=0)


def _is_implied(g: Guard, guards: Sequence[Guard]) -> bool:
    """Whether other guards imply a lower bound of 1 or 2 that a tracer assumed."""
    bound, symbols = g.relation, g.relation.free_symbols
    if g.line or not isinstance(bound, sympy.Ge) or len(symbols) != 1 or not isinstance(bound.rhs, sympy.Integer):
        return False
    if not bound.lhs.is_nonnegative:
        return False
    others = [o for o in guards if o is not g and o.relation.free_symbols == symbols]
    below = [{str(bound.lhs): length} for length in range(int(bound.rhs))]
    return all(any(not is_met(o, sizes) for o in others) for sizes in below)


def _lower_bound(symbol: Symbol, guards: Sequence[Guard]) -> int | None:
    """Return the minimum size allowed by guards of the form ``size >= number``."""
    bounds = [] if symbol.low is None else [symbol.low]
    bounds += [
        int(g.relation.rhs) + isinstance(g.relation, sympy.Gt)
        for g in guards
        if isinstance(g.relation, sympy.Ge | sympy.Gt)
        and g.relation.lhs == symbol.expr
        and isinstance(g.relation.rhs, sympy.Integer)
    ]
    return max(bounds, default=None)


def select_reusable_results(runs: Sequence[EagerRun], result: TracedGraph) -> list[list[torch.Tensor]]:
    """Return the outputs of a validated graph for each tracing call, as eager computed them.

    The list is empty if another run may give other results, since the model draws random numbers or changes its state,
    if eager returns Python numbers, and if the results are larger than `MAX_KEPT_RESULT_BYTES`.
    """
    graph, outputs = result.graph, result.signature.outputs
    if graph.state or any(run.state or run.unfit for run in runs) or any(node.is_random for node in walk(graph)):
        return []
    positions = {leaf.index: position for position, leaf in enumerate(outputs) if leaf.index is not None}
    leaves = [[run.leaves[positions[i]] for i in range(len(graph.outputs))] for run in runs]
    if not all(isinstance(x, torch.Tensor) for results in leaves for x in results):  # numbers, which the graph computes
        return []
    found = [[torch.view_as_real(x.resolve_conj()) if x.is_complex() else x for x in results] for results in leaves]
    used_bytes = sum(x.numel() * x.element_size() for results in found for x in results)
    return found if used_bytes <= MAX_KEPT_RESULT_BYTES else []


def _list_inputs(numbers: list[int]) -> str:
    if not numbers:
        return "no input"
    return f"input{'s' if len(numbers) > 1 else ''} {' and '.join(map(str, numbers))}"


def _shape_of(result: Any) -> Any:
    return (result.dtype, result.shape) if isinstance(result, torch.Tensor) else result
