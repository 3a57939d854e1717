"""L5, dynamic shapes: one artifact of each operator, block and graph serves every size, one after the other."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import combinations, islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from clika_ref.core.errors import TargetError
from clika_ref.core.ir import Graph
from clika_ref.core.operators import Operator
from clika_ref.core.samples import Choice, TensorDescription, TensorSample
from clika_ref_conformance.cases import CaseRun, Check, GraphCase, Outcome, Task
from clika_ref_conformance.drawing.graphs.random_graphs import compute_graph_seed, draw_graph_cases
from clika_ref_conformance.drawing.reducing.dims import fix_symbols
from clika_ref_conformance.drawing.sampling import CRASHING_OPERATORS, UnjudgedDtypeError, collect_judged_calls
from clika_ref_conformance.drawing.symbolic.calls import (
    SymbolicCall,
    has_no_elements,
    has_size_dependent_numbers,
    make_symbolic_call,
)
from clika_ref_conformance.drawing.symbolic.expressions import FILL_OPERATOR, generate_expression_cases
from clika_ref_conformance.drawing.symbolic.graphs import BATCH, make_dim_dynamic
from clika_ref_conformance.drawing.symbolic.size_dependence import ReplayableCall, SizeDecision, draw_replayable_call
from clika_ref_conformance.execution.case_checks import run_case
from clika_ref_conformance.execution.case_reduction import CaseBatch
from clika_ref_conformance.suite import Suite
from clika_ref_conformance.verdicts import Comparison, Reason, Verdict, make_not_run

LEVEL = "dynamic"

SIZES_PER_CALL = 7
"""Sets of sizes per call: as drawn, maximum, minimum, two coprime ones, ones and zeros."""

GRAPHS_SUBJECT = "random graphs"
EXPRESSIONS_SUBJECT = "size expressions"

EXPRESSIONS_PER_SIZES = 6
"""Expressions for each set of sizes that a profile requests, as they are cheap."""

DRAWS_PER_CALL = 9
"""Drawn calls per requested call: some have no dynamic dim, and most are similar to another."""

TYPE_RULE_FACTOR = 3
"""Factor on the calls of an operator with its own type rule, as the target computes the sizes of its results."""

SIZE_DEPENDENT_FACTOR = 5
"""The same for an operator with numbers that depend on sizes as well: their computation differs from call to call."""

PROBE_DRAWS = 4
"""Number of drawn calls to find out whether an operator's numbers depend on sizes."""


def tasks(suite: Suite) -> list[Task]:
    """Return a task for every operator with samples, one for random graphs and one for random expressions."""
    operators = sorted(suite.registry.operators.values(), key=lambda op: op.name)
    subjects = [op.name for op in operators if op.sampler is not None]
    expressions = (
        [Task(LEVEL, EXPRESSIONS_SUBJECT, "int64", dynamic=True)] if FILL_OPERATOR in suite.registry.operators else []
    )
    return [*(Task(LEVEL, subject, "float32", dynamic=True) for subject in (*subjects, GRAPHS_SUBJECT)), *expressions]


def checks(task: Task, suite: Suite) -> Sequence[Check]:
    """Return one check for each drawn call, or for each graph or expression."""
    if task.subject == GRAPHS_SUBJECT:
        return _make_graph_checks(suite)
    if task.subject == EXPRESSIONS_SUBJECT:
        return _make_expression_checks(suite)
    op = suite.registry.operators[task.subject]
    count = max(1, suite.profile.shape_profiles // SIZES_PER_CALL) * _call_factor(op, suite.profile.seed)
    pool = CallPool(op, suite.profile.seed, count)
    batch = CaseBatch(suite)
    names = [f"sizes-{i}" for i in range(count)]
    return [Check(name, partial(_check_call, pool, index, name, batch)) for index, name in enumerate(names)]


def _call_factor(op: Operator, seed: int) -> int:
    """Return the factor on the number of calls of an operator."""
    try:
        drawn = collect_judged_calls(partial(draw_replayable_call, op, f"{seed}-{turn}") for turn in range(PROBE_DRAWS))
    except UnjudgedDtypeError:  # each check reports it if it finds no other call
        return 1
    sized = any(has_size_dependent_numbers(drawing) for drawing in drawn)
    if op.type_rule is None:
        return TYPE_RULE_FACTOR if sized else 1
    return SIZE_DEPENDENT_FACTOR if sized else TYPE_RULE_FACTOR


def _make_graph_checks(suite: Suite) -> list[Check]:
    found = draw_graph_cases(suite, suite.profile.shape_profiles, compute_graph_seed(LEVEL, suite))
    batch = CaseBatch(suite)
    named_cases = [(f"graph-{i:03}", case) for i, case in enumerate(found)]
    return [Check(name, partial(_check_graph, name, case, batch)) for name, case in named_cases]


def _make_expression_checks(suite: Suite) -> list[Check]:
    """Return checks of size computations, including negative numbers, which no operator's samples draw."""
    drawn_cases = generate_expression_cases(suite.registry.operators[FILL_OPERATOR], str(suite.profile.seed))
    found = islice(drawn_cases, EXPRESSIONS_PER_SIZES * suite.profile.shape_profiles)
    return [Check(case.name, partial(run_case, case, suite)) for case in found]


def _check_graph(name: str, case: GraphCase, batch: CaseBatch) -> Outcome:
    found = make_dim_dynamic(case)
    if found is None:
        return Outcome(name, make_not_run(Reason.NO_SIZES, "no dim of the graph may vary"))
    rejection = _compile_error(found.graph, batch.suite)
    if rejection is not None and BATCH.name in re.findall(r"\w+", rejection):
        return Outcome(name, Comparison(Verdict.UNSUPPORTED, rejection))
    return replace(_compare_with_static(batch.judge(found), batch.suite), name=name)


def _check_call(pool: CallPool, index: int, name: str, batch: CaseBatch) -> Outcome:
    found = pool.call(index)
    if isinstance(found, str):
        return Outcome(name, make_not_run(Reason.NO_SIZES, found))
    outcome = run_case(make_symbolic_case(found, _list_runs(found), name), batch.suite)
    if not outcome.verdict.is_failure:
        return replace(outcome, name=name)
    found = drop_rejected_symbols(found, batch.suite)
    if isinstance(found, str):
        return Outcome(name, Comparison(Verdict.UNSUPPORTED, found))
    case = make_symbolic_case(found, _list_runs(found), name)
    return replace(_compare_with_static(batch.judge(case), batch.suite), name=name)


def drop_rejected_symbols(found: SymbolicCall, suite: Suite) -> SymbolicCall | str:
    """Return the call without the symbols that the target rejects, or the reason if it rejects all of them.

    A rejection is a `TargetError` of ``compile`` that names the symbol; other errors are judged later.
    """
    fixed: list[SizeDecision] = []
    while (reason := _compile_error(found.graph, suite)) is not None:
        words = set(re.findall(r"\w+", reason))
        rejection = [decision for decision in found.varied_sizes if str(decision.symbol) in words]
        if not rejection:
            return found
        fixed += rejection
        fewer = make_symbolic_call(found.replayable, fixed)
        if isinstance(fewer, str):
            return reason
        found = fewer
    return found


def _compile_error(graph: Graph, suite: Suite) -> str | None:
    with TemporaryDirectory(dir=suite.folder) as folder:
        try:
            suite.target.compile(graph.clone(), Path(folder) / "model.onnx")
        except TargetError as error:
            return str(error)
        except Exception:  # noqa: BLE001 - judged when the case is run
            return None
    return None


def _list_runs(found: SymbolicCall) -> list[CaseRun]:
    """Return all inputs, with inputs without elements for operators that survive them.

    Inputs without elements are followed by a larger one, to detect a reused buffer.
    """
    empty = [] if found.replayable.op.name in CRASHING_OPERATORS else found.empty()
    return [*found.runs, *empty, *([replace(found.runs[0], name="as drawn, last")] if empty else [])]


def _compare_with_static(outcome: Outcome, suite: Suite) -> Outcome:
    """Add to a failure whether it also fails if compiled for that size alone."""
    comparison, case = outcome.comparison, outcome.case
    runs = [run for run in case.runs if run.name == outcome.run] if case is not None else []
    if not comparison.verdict.is_failure or case is None or not runs:
        return outcome
    alone = run_case(fix_symbols(case, runs[0]), suite).verdict
    relation = f"{alone}, too" if alone.is_failure else f"{alone}, so only the dynamic form is wrong"
    message = f"{comparison.message}; compiled for this size only: {relation}"
    return replace(outcome, comparison=replace(comparison, message=message))


@dataclass
class CallPool:
    """Drawn calls of an operator, ordered by how much each differs from those before it."""

    op: Operator
    seed: int
    count: int
    """Number of requested calls."""
    symbolic: dict[int, SymbolicCall | str] = field(default_factory=dict[int, SymbolicCall | str], repr=False)
    """Symbolic calls of drawn calls so far, by their `id`, as they take longer than drawing."""

    @cached_property
    def drawings(self) -> list[ReplayableCall]:
        """Drawn calls: first as many as requested, each with the largest share of new pairs of decisions.

        Ties are resolved by the largest number of dims. It is a share, as with a count, calls with many decisions would
        always come first. Calls that show little of their decisions come last.
        """
        left = collect_judged_calls(
            partial(draw_replayable_call, self.op, f"{self.seed}-{turn}") for turn in range(DRAWS_PER_CALL * self.count)
        )
        pairs = {id(drawing): set(combinations(_classify_decisions(drawing), 2)) for drawing in left}
        chosen: list[ReplayableCall] = []
        last: list[ReplayableCall] = []
        seen: set[object] = set()

        def rank(drawing: ReplayableCall) -> tuple[float, int]:
            own = pairs[id(drawing)]
            return len(own - seen) / max(len(own), 1), sum(
                len(o.shape) for o in drawing.call.operands if isinstance(o, TensorSample | torch.Tensor)
            )

        while left and len(chosen) < self.count:
            best = max(left, key=rank)
            left.remove(best)
            if has_no_elements(best) or (len(last) < self.count > 2 * len(chosen) and self._has_fixed_dims(best)):
                last.append(best)
            else:
                seen |= pairs[id(best)]
                chosen.append(best)
        return [*chosen, *left, *last]

    def call(self, index: int) -> SymbolicCall | str:
        """Return a call with dynamic dims, another one for each index, or the reason why there is none."""
        found: SymbolicCall | str = "nothing was drawn"
        for drawing in self.drawings[index :: self.count]:
            found = self._make_symbolic(drawing)
            if isinstance(found, SymbolicCall) and len(found.runs) > 1:
                return found
        return found if isinstance(found, str) else "every drawn call is legal for one size only"

    def _has_fixed_dims(self, drawing: ReplayableCall) -> bool:
        """Return whether a dim that was drawn can only have the size that it was drawn with."""
        found = self._make_symbolic(drawing)
        return isinstance(found, str) or any(p.dim is not None and p not in found.varied_sizes for p in drawing.ranges)

    def _make_symbolic(self, drawing: ReplayableCall) -> SymbolicCall | str:
        if id(drawing) not in self.symbolic:
            self.symbolic[id(drawing)] = make_symbolic_call(drawing)
        return self.symbolic[id(drawing)]


def _classify_decisions(drawing: ReplayableCall) -> list[tuple[int, object]]:
    """Return the decisions of a drawn call as classes, since exact values differ for each size, as a last index does.

    They include the resulting attributes, as samples may reach one in several ways.
    """
    attributes = [(-1, (name, repr(value))) for name, value in drawing.call.attrs.items()]
    return [
        (at, _decision_class(description, value)) for at, (description, value) in enumerate(drawing.decided)
    ] + attributes


def _decision_class(description: Any, value: Any) -> object:
    """Return an option's index, the range limits that a value equals, or a tensor's rank and whether a dim is 1."""
    match description:
        case Choice(options):
            return [repr(option) for option in options].index(repr(value))
        case TensorDescription():
            return len(value.shape), 1 in value.shape
        case _:
            return value == description.low, value == description.high


def make_symbolic_case(found: SymbolicCall, runs: Sequence[CaseRun], name: str) -> GraphCase:
    """Return the case of a symbolic call: one graph, and inputs of several sizes."""
    (node,) = found.graph.nodes
    facts = {
        "attributes": dict(node.attrs),
        "shapes": [str(v.type) for v in found.graph.inputs],
        "fixed": len(found.replayable.ranges) - len(found.varied_sizes),
    }
    return GraphCase(f"{found.replayable.op.name} {name}", found.graph, runs, facts)
