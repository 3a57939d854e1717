"""L1: every operator in every dtype, on covering rows with the mandatory vectors, and then on drawn calls."""

from __future__ import annotations

import functools
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from clika_ref.core.errors import ClikaError
from clika_ref.core.operators import Operator
from clika_ref.core.samples import Call, TensorSample
from clika_ref_conformance.cases import CaseRun, Check, GraphCase, Outcome, Task
from clika_ref_conformance.drawing.calls.call_graphs import build_call_graph, has_huge_result
from clika_ref_conformance.drawing.calls.covering import draw_covering_calls, draw_empty_calls
from clika_ref_conformance.drawing.calls.drawn_call import DrawnCall, fill_operands, format_call
from clika_ref_conformance.drawing.calls.dtypes import select_dtypes
from clika_ref_conformance.drawing.calls.hypothesis_driver import make_call_strategy
from clika_ref_conformance.drawing.calls.layouts import make_layout_runs, make_literal_variants
from clika_ref_conformance.drawing.calls.vectors import (
    NEAR_NUMBERS,
    SPECIAL_VALUES,
    count_special_positions,
    make_runs,
    make_runs_near_numbers,
    make_typical_run,
)
from clika_ref_conformance.drawing.generation import collect_without_mutations, shrink
from clika_ref_conformance.drawing.sampling import CRASHING_OPERATORS, SampleError
from clika_ref_conformance.eager_calls import call_eagerly
from clika_ref_conformance.execution.case_checks import has_same_bits, run_case
from clika_ref_conformance.execution.case_packs import CasePack
from clika_ref_conformance.execution.case_reduction import CaseBatch
from clika_ref_conformance.execution.distribution_checks import check_distributions
from clika_ref_conformance.judged_dtypes import check_judged_dtypes
from clika_ref_conformance.suite import Suite
from clika_ref_conformance.verdicts import Comparison, Reason, Verdict, make_not_run

LEVEL = "operators"

COVER_PACK_CHECK = "cover-pack"
"""Check that compiles all rows of the cover but the first as one graph; rows that fail in it are run alone."""

DRAWN_PACK_CHECK = "drawn-pack"
"""The same for variants of literals, and for empty and drawn calls."""

MOMENTS_CHECK = "moments"
"""Check of a random operator's distributions; all other checks see only the structure of random results."""

ANY_MAGNITUDE_CLASSES = ("exact", "ulp", "softmax")
"""Error classes with a bound per element, or with the maximum subtracted: large operands cannot overflow."""


def tasks(suite: Suite) -> list[Task]:
    """Return one task for each operator and each of the profile's dtypes that it takes."""
    return [
        Task(LEVEL, op.name, str(dtype).removeprefix("torch."))
        for op in suite.registry.operators.values()
        if op.sampler is not None
        for dtype in _select_dtypes(op, suite)
    ]


def _select_dtypes(op: Operator, suite: Suite) -> list[torch.dtype]:
    """Return the profile's dtypes that an operator takes."""
    return select_dtypes(op, tuple(getattr(torch, name) for name in suite.profile.dtypes))


def checks(task: Task, suite: Suite) -> Sequence[Check]:
    """Return the checks of one operator in one dtype: the cover, layouts, literals, empty dims, drawn calls."""
    op, dtype, profile = suite.registry.operators[task.subject], getattr(torch, task.dtype), suite.profile
    try:
        rows = draw_covering_calls(op, dtype, profile.seed, profile.rows)
    except SampleError as error:
        found = Outcome("cover", error.comparison)
        return [Check("cover", lambda: found)]
    column = OperatorChecks(op, dtype, suite, rows)
    alone, *together = [
        Check(name, functools.partial(column.check_cover_row, name, index))
        for index, name in enumerate(column.cover_names)
    ]
    found = [alone]
    if together:
        found += [Check(COVER_PACK_CHECK, lambda: column.cover_pack.run()), *together]  # noqa: PLW0108 - made if it runs
    largest = max(rows, key=lambda row: max((o.rank for o in _tensor_samples(row.call)), default=0))
    if _tensor_samples(largest.call):
        found.append(Check("layouts", functools.partial(column.check_layouts, "layouts", largest)))
    drawn = [f"drawn-{i:02}" for i in range(column.count)]
    if drawn or column.literals or column.empty:
        found.append(Check(DRAWN_PACK_CHECK, lambda: column.drawn_pack.run()))  # noqa: PLW0108 - made if it runs
    for name, row in (*column.literals.items(), *column.empty):
        found.append(Check(name, functools.partial(column.check_typical, name, row)))
    found += [Check(name, functools.partial(column.check_drawn, name, i)) for i, name in enumerate(drawn)]
    return [*found, *([Check(MOMENTS_CHECK, column.check_moments)] if op.random else [])]


def _tensor_samples(call: Call) -> list[TensorSample]:
    return [o for o in call.operands if isinstance(o, TensorSample)]


@dataclass
class OperatorChecks:
    """One operator in one dtype."""

    op: Operator
    dtype: torch.dtype
    suite: Suite
    rows: Sequence[DrawnCall]
    """Covering rows."""
    is_reduced: bool = False
    """Whether a failure has been reduced: later failures usually have the same cause."""

    @property
    def cover_names(self) -> list[str]:
        """Names of the rows of the cover."""
        return [f"cover-{i:02}" for i in range(len(self.rows))]

    @functools.cached_property
    def count(self) -> int:
        """Number of drawn calls."""
        profile, first = self.suite.profile, _select_dtypes(self.op, self.suite)[0]
        return profile.drawn if self.dtype == first else profile.drawn_further

    @functools.cached_property
    def literals(self) -> dict[str, DrawnCall]:
        """Calls with literals in forms that eager accepts although the samples do not describe them, by name.

        Each form is tried once, on the first row that has it.
        """
        found: dict[str, DrawnCall] = {}
        for row in self.rows:
            for form, call in make_literal_variants(self.op, row.call, self.dtype):
                if f"literal-{form}" not in found and self._accepts(call):
                    found[f"literal-{form}"] = replace(row, call=call)
        return found

    @functools.cached_property
    def empty(self) -> list[tuple[str, DrawnCall]]:
        """Calls without elements that eager accepts, by name."""
        if self.op.name in CRASHING_OPERATORS:
            return []
        found = draw_empty_calls(self.op, self.dtype, self.suite.profile.seed, self._eager_results)
        return [(f"empty-{i}", row) for i, row in enumerate(found)]

    def check_cover_row(self, name: str, index: int) -> Outcome:
        """Run one row of the cover on its vectors."""
        found = self.cover_pack.found.get(self._case_name(name)) if index else None
        return found or self._run_and_reduce(name, self.rows[index], self._make_vectors(name, index))

    @functools.cached_property
    def cover_pack(self) -> CasePack:
        """All rows but the first as one graph, as compiling is the slowest part of a call."""
        later = [*enumerate(self.cover_names)][1:]
        return self._make_pack(
            COVER_PACK_CHECK, [self._make_case(name, self.rows[i], self._make_vectors(name, i)) for i, name in later]
        )

    def _make_vectors(self, name: str, index: int) -> list[CaseRun]:
        """Return the vectors of a row; the first row also takes the positions that the others leave out.

        Once special values have been at every position, each round of further rows takes every second one of the other
        vectors. Values near the numbers of a call are different in each row.
        """
        row = self.rows[index]
        typical, *runs = self._make_runs(row, self._seed(name), index)
        positions = count_special_positions(row.call.operands)
        rounds = index // positions if positions else 0
        if rounds:
            own = [run for run in runs if run.name.startswith((*SPECIAL_VALUES, NEAR_NUMBERS))]
            runs = [*own, *[run for run in runs if run not in own][rounds % 2 :: 2]]
        runs = [typical, *runs]
        names = {run.name for run in runs}
        for later in range(len(self.rows), positions) if not index else ():
            more = self._make_runs(row, self._seed(name), later)
            runs += [run for run in more if run.name not in names]
            names.update(run.name for run in more)
        return runs

    def check_layouts(self, name: str, row: DrawnCall) -> Outcome:
        """Run one row on inputs in other memory layouts."""
        typical = make_typical_run(row.call.operands, self._seed(name))
        return self._run_and_reduce(name, row, [typical, *make_layout_runs(typical, row.call.operands)])

    def check_typical(self, name: str, row: DrawnCall) -> Outcome:
        """Run a call on typical elements, and on elements around its numbers."""
        return self.drawn_pack.found.get(self._case_name(name)) or self._run_and_reduce(
            name, row, self._make_typical_runs(name, row)
        )

    def _make_typical_runs(self, name: str, row: DrawnCall) -> list[CaseRun]:
        return make_runs_near_numbers(row.call.operands, self._seed(name), row.call.attrs.values())

    def check_drawn(self, name: str, index: int) -> Outcome:
        """Run a drawn call on typical elements and on one of its vectors."""
        if index >= len(self._drawn_calls):
            text = f"there are only {len(self._drawn_calls)} different calls"
            return Outcome(name, make_not_run(Reason.FEW_CALLS, text))
        return self.drawn_pack.found.get(self._case_name(name)) or self._run_and_reduce(name, self._drawn_calls[index])

    def check_moments(self) -> Outcome:
        """Compare the distribution of random results with eager's."""
        rows = [*self.rows, *self._drawn_calls]
        made = [
            self._make_case(MOMENTS_CHECK, row, self._make_typical_runs(f"{MOMENTS_CHECK}-{i}", row))
            for i, row in enumerate(rows)
        ]
        return check_distributions(MOMENTS_CHECK, [case for case in made if isinstance(case, GraphCase)], self.suite)

    @functools.cached_property
    def drawn_pack(self) -> CasePack:
        """All literals, empty and drawn calls as one graph."""
        typical = (*self.literals.items(), *self.empty)
        made = [self._make_case(name, row, self._make_typical_runs(name, row)) for name, row in typical]
        made += [self._make_case(f"drawn-{i:02}", row) for i, row in enumerate(self._drawn_calls)]
        return self._make_pack(DRAWN_PACK_CHECK, made)

    def _make_pack(self, name: str, made: Sequence[GraphCase | Outcome]) -> CasePack:
        """Return a pack of the cases, except those with results that have data-dependent sizes."""
        cases = [case for case in made if isinstance(case, GraphCase)]
        return CasePack(name, [c for c in cases if all(v.type.is_static for v in c.graph.outputs)], self.suite)

    def _case_name(self, check: str) -> str:
        return f"{self.op.name}-{check}"

    @functools.cached_property
    def _drawn_calls(self) -> list[DrawnCall]:
        return collect_without_mutations(make_call_strategy(self.op, self.dtype), self.count, self._seed("drawn"))

    def _seed(self, name: str) -> int:
        return zlib.crc32(f"{self.op.name}/{self.dtype}/{name}/{self.suite.profile.seed}".encode()) % 2**24

    def _make_runs(self, row: DrawnCall, seed: int, turn: int, only: int | None = None) -> list[CaseRun]:
        vast = self.op.error.kind in ANY_MAGNITUDE_CLASSES
        return make_runs(
            row.call.operands, seed, turn, attributes=row.call.attrs.values(), every_magnitude=vast, only=only
        )

    def _accepts(self, call: Call) -> bool:
        """Return whether eager accepts a call, and its result is small enough to compare."""
        run = make_typical_run(call.operands, 0)
        return (
            not has_huge_result(self.op, fill_operands(call, run.inputs), call.attrs)
            and self._eager_error(call, run) is None
        )

    def _eager_results(self, call: Call) -> Sequence[torch.Tensor] | None:
        """Return eager's results of a call on typical elements; None if it rejects the call."""
        results = self._call_eager(call, make_typical_run(call.operands, 0))
        return None if isinstance(results, str) else results

    def _eager_error(self, call: Call, run: CaseRun) -> str | None:
        """Return eager's error for a call on these tensors, as their layout may matter; None if there is none."""
        results = self._call_eager(call, run)
        return results if isinstance(results, str) else None

    def _call_eager(self, call: Call, run: CaseRun) -> Sequence[torch.Tensor] | str:
        try:
            results = call_eagerly(self.op, fill_operands(call, run.inputs), call.attrs)
        except Exception as error:  # noqa: BLE001 - any error means that eager rejects the call
            return f"{type(error).__name__}: {(str(error) or '?').splitlines()[0]}"
        return results or "it returns no tensor"

    def _run_and_reduce(self, name: str, row: DrawnCall, runs: Sequence[CaseRun] | None = None) -> Outcome:
        """Run a call, and reduce the first failure."""
        outcome = self._run_call(name, row, runs)
        if not outcome.verdict.is_failure or self.is_reduced:
            return outcome
        self.is_reduced = True
        profile, strategy = self.suite.profile, make_call_strategy(self.op, self.dtype)
        smaller = shrink(
            strategy,
            self.count,
            self._seed("drawn"),
            lambda other: self._run_call(name, other).verdict is outcome.verdict,
            profile.shrink_seconds,
        )
        small = outcome if smaller is None else self._run_call(name, smaller)
        return small if small.case is None else replace(CaseBatch(self.suite).judge(small.case), name=name)

    def _run_call(self, name: str, row: DrawnCall, runs: Sequence[CaseRun] | None = None) -> Outcome:
        """Return the outcome of a call."""
        made = self._make_case(name, row, runs)
        return made if isinstance(made, Outcome) else replace(run_case(made, self.suite), name=name)

    def _make_case(self, name: str, row: DrawnCall, runs: Sequence[CaseRun] | None = None) -> GraphCase | Outcome:
        """Return a call as a case, or an outcome if eager rejects it or it has no type."""
        if row.error:
            return Outcome(name, Comparison(Verdict.SAMPLE, row.error))
        text = format_call(self.op, row.call)
        if runs is None:
            runs = self._make_runs(row, row.seed, row.vector, only=row.vector)
        before = [t.clone() for t in runs[0].inputs]
        rejection = self._eager_error(row.call, runs[0])
        if rejection is not None:
            return Outcome(name, _explain_rejection(text, rejection, row))
        written = [i for i, t in enumerate(runs[0].inputs) if not has_same_bits(t, before[i])]
        if written:
            return Outcome(
                name, Comparison(Verdict.CONTRACT, f"the reference writes into operand {written[0]} of {text}")
            )
        accepted = [runs[0], *(run for run in runs[1:] if self._eager_error(row.call, run) is None)]
        try:
            graph = build_call_graph(self.op, fill_operands(row.call, accepted[0].inputs), row.call.attrs)
        except ClikaError as error:
            return Outcome(name, Comparison(Verdict.CONTRACT, f"{text}: {error}"))
        other = check_judged_dtypes(graph)
        if other is not None:
            return Outcome(name, other)
        facts = {
            "attrs": dict(row.call.attrs),
            "shapes": [list(o.shape) for o in _tensor_samples(row.call)],
            "call": text,
        }
        return GraphCase(self._case_name(name), graph, accepted, facts)


def _explain_rejection(text: str, rejection: str, row: DrawnCall) -> Comparison:
    """Return the comparison for a call that eager rejects.

    It is the samples' fault, unless they do not name the dtype or eager has no kernel for it.
    """
    if "not implemented for" in rejection or rejection.startswith("NotImplementedError"):
        return make_not_run(Reason.NO_KERNEL, f"eager has no kernel for {text}: {rejection}")
    if row.has_unlisted_dtype:
        message = f"eager rejects {text}, with a dtype that its samples do not list: {rejection}"
        return make_not_run(Reason.UNLISTED_DTYPE, message)
    return Comparison(Verdict.SAMPLE, f"the samples draw {text}, which eager rejects: {rejection}")
