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
from clika_ref_conformance.cases import Case, Check, Outcome, Run, Task
from clika_ref_conformance.drawing.calls.covering import covering_calls, empty_calls
from clika_ref_conformance.drawing.calls.drawn import DrawnCall, filled, shown
from clika_ref_conformance.drawing.calls.dtypes import columns
from clika_ref_conformance.drawing.calls.hypothesis_driver import calls
from clika_ref_conformance.drawing.calls.layouts import laid_out, literal_variants
from clika_ref_conformance.drawing.calls.realizing import graph_of, holds_many
from clika_ref_conformance.drawing.calls.vectors import AROUND, SPECIAL, runs_around, runs_of, slots, typical_run
from clika_ref_conformance.drawing.generation import collect_apart, shrink
from clika_ref_conformance.drawing.sampling import FRAGILE, SampleError
from clika_ref_conformance.execution.batches import Batch
from clika_ref_conformance.execution.case_checks import run_case, same_bits
from clika_ref_conformance.execution.moments import run_moments
from clika_ref_conformance.execution.packing import Pack
from clika_ref_conformance.judged_dtypes import unjudged_in
from clika_ref_conformance.suite import Suite
from clika_ref_conformance.verdicts import Comparison, Reason, Verdict, not_run

LEVEL = "operators"

COVER_PACK = "cover-pack"
"""Check that compiles all rows of the cover but the first as one graph; rows that fail in it are run alone."""

PACK = "drawn-pack"
"""The same for variants of literals, and for empty and drawn calls."""

MOMENTS = "moments"
"""Check of a random operator's distributions; all other checks see only the structure of random results."""

ANY_MAGNITUDE = ("exact", "ulp", "softmax")
"""Error classes with a bound per element, or with the maximum subtracted: large operands cannot overflow."""


def tasks(suite: Suite) -> list[Task]:
    """Return one task for each operator and each of the profile's dtypes that it takes."""
    return [
        Task(LEVEL, op.name, str(dtype).removeprefix("torch."))
        for op in suite.registry.operators.values()
        if op.sampler is not None
        for dtype in _dtypes(op, suite)
    ]


def _dtypes(op: Operator, suite: Suite) -> list[torch.dtype]:
    """Return the profile's dtypes that an operator takes."""
    return columns(op, tuple(getattr(torch, name) for name in suite.profile.dtypes))


def checks(task: Task, suite: Suite) -> Sequence[Check]:
    """Return the checks of one operator in one dtype: the cover, layouts, literals, empty dims, drawn calls."""
    op, dtype, profile = suite.registry.operators[task.subject], getattr(torch, task.dtype), suite.profile
    try:
        rows = covering_calls(op, dtype, profile.seed, profile.rows)
    except SampleError as error:
        found = Outcome("cover", error.comparison)
        return [Check("cover", lambda: found)]
    column = Column(op, dtype, suite, rows)
    alone, *together = [
        Check(name, functools.partial(column.covered, name, index)) for index, name in enumerate(column.covers)
    ]
    found = [alone, *([Check(COVER_PACK, column.covered_together), *together] if together else [])]
    largest = max(rows, key=lambda row: max((o.rank for o in _samples(row.call)), default=0))
    if _samples(largest.call):
        found.append(Check("layouts", functools.partial(column.laid_out, "layouts", largest)))
    drawn = [f"drawn-{i:02}" for i in range(column.count)]
    found += [Check(PACK, column.packed)] if drawn or column.literals or column.empty else []
    for name, row in (*column.literals.items(), *column.empty):
        found.append(Check(name, functools.partial(column.typical, name, row)))
    found += [Check(name, functools.partial(column.drawn, name, i)) for i, name in enumerate(drawn)]
    return [*found, *([Check(MOMENTS, column.moments)] if op.random else [])]


def _samples(call: Call) -> list[TensorSample]:
    return [o for o in call.operands if isinstance(o, TensorSample)]


@dataclass
class Column:
    """One operator in one dtype."""

    op: Operator
    dtype: torch.dtype
    suite: Suite
    rows: Sequence[DrawnCall]
    """Covering rows."""
    shrunk: bool = False
    """Whether a failure has been reduced: later failures usually have the same cause."""

    @property
    def covers(self) -> list[str]:
        """Names of the rows of the cover."""
        return [f"cover-{i:02}" for i in range(len(self.rows))]

    @functools.cached_property
    def count(self) -> int:
        """Number of drawn calls."""
        profile, first = self.suite.profile, _dtypes(self.op, self.suite)[0]
        return profile.drawn if self.dtype == first else profile.drawn_further

    @functools.cached_property
    def literals(self) -> dict[str, DrawnCall]:
        """Calls with literals in forms that eager accepts although the samples do not describe them, by name.

        Each form is tried once, on the first row that has it.
        """
        found: dict[str, DrawnCall] = {}
        for row in self.rows:
            for form, call in literal_variants(self.op, row.call, self.dtype):
                if f"literal-{form}" not in found and self._accepts(call):
                    found[f"literal-{form}"] = replace(row, call=call)
        return found

    @functools.cached_property
    def empty(self) -> list[tuple[str, DrawnCall]]:
        """Calls without elements that eager accepts, by name."""
        if self.op.name in FRAGILE:
            return []
        found = empty_calls(self.op, self.dtype, self.suite.profile.seed, self._results)
        return [(f"empty-{i}", row) for i, row in enumerate(found)]

    def covered(self, name: str, index: int) -> Outcome:
        """Run one row of the cover on its vectors."""
        found = self._cover_pack.found.get(self._name(name)) if index else None
        return found or self._judged(name, self.rows[index], self._vectors(name, index))

    def covered_together(self) -> Outcome:
        """Run all rows but the first as one graph, as compiling is the slowest part of a call."""
        return self._cover_pack.run()

    @functools.cached_property
    def _cover_pack(self) -> Pack:
        later = [*enumerate(self.covers)][1:]
        return self._packed(COVER_PACK, [self._case(name, self.rows[i], self._vectors(name, i)) for i, name in later])

    def _vectors(self, name: str, index: int) -> list[Run]:
        """Return the vectors of a row; the first row also takes the positions that the others leave out.

        Once special values have been at every position, each round of further rows takes every second one of the other
        vectors. Values near the numbers of a call are different in each row.
        """
        row = self.rows[index]
        typical, *runs = self._runs(row, self._seed(name), index)
        places = slots(row.call.operands)
        rounds = index // places if places else 0
        if rounds:
            own = [run for run in runs if run.name.startswith((*SPECIAL, AROUND))]
            runs = [*own, *[run for run in runs if run not in own][rounds % 2 :: 2]]
        runs = [typical, *runs]
        names = {run.name for run in runs}
        for later in range(len(self.rows), places) if not index else ():
            more = self._runs(row, self._seed(name), later)
            runs += [run for run in more if run.name not in names]
            names.update(run.name for run in more)
        return runs

    def laid_out(self, name: str, row: DrawnCall) -> Outcome:
        """Run one row on inputs in other memory layouts."""
        typical = typical_run(row.call.operands, self._seed(name))
        return self._judged(name, row, [typical, *laid_out(typical, row.call.operands)])

    def typical(self, name: str, row: DrawnCall) -> Outcome:
        """Run a call on typical elements, and on elements around its numbers."""
        return self._pack.found.get(self._name(name)) or self._judged(name, row, self._typical(name, row))

    def _typical(self, name: str, row: DrawnCall) -> list[Run]:
        return runs_around(row.call.operands, self._seed(name), row.call.attrs.values())

    def drawn(self, name: str, index: int) -> Outcome:
        """Run a drawn call on typical elements and on one of its vectors."""
        if index >= len(self._collected):
            text = f"there are only {len(self._collected)} different calls"
            return Outcome(name, not_run(Reason.FEW_CALLS, text))
        return self._pack.found.get(self._name(name)) or self._judged(name, self._collected[index])

    def moments(self) -> Outcome:
        """Compare the distribution of random results with eager's."""
        rows = [*self.rows, *self._collected]
        made = [self._case(MOMENTS, row, self._typical(f"{MOMENTS}-{i}", row)) for i, row in enumerate(rows)]
        return run_moments(MOMENTS, [case for case in made if isinstance(case, Case)], self.suite)

    def packed(self) -> Outcome:
        """Run all literals, empty and drawn calls as one graph."""
        return self._pack.run()

    @functools.cached_property
    def _pack(self) -> Pack:
        typical = (*self.literals.items(), *self.empty)
        made = [self._case(name, row, self._typical(name, row)) for name, row in typical]
        made += [self._case(f"drawn-{i:02}", row) for i, row in enumerate(self._collected)]
        return self._packed(PACK, made)

    def _packed(self, name: str, made: Sequence[Case | Outcome]) -> Pack:
        """Return a pack of the cases, except those with results that have data-dependent sizes."""
        cases = [case for case in made if isinstance(case, Case)]
        return Pack(name, [c for c in cases if all(v.type.is_static for v in c.graph.outputs)], self.suite)

    def _name(self, check: str) -> str:
        return f"{self.op.name}-{check}"

    @functools.cached_property
    def _collected(self) -> list[DrawnCall]:
        return collect_apart(calls(self.op, self.dtype), self.count, self._seed("drawn"))

    def _seed(self, name: str) -> int:
        return zlib.crc32(f"{self.op.name}/{self.dtype}/{name}/{self.suite.profile.seed}".encode()) % 2**24

    def _runs(self, row: DrawnCall, seed: int, turn: int, only: int | None = None) -> list[Run]:
        vast = self.op.error.kind in ANY_MAGNITUDE
        return runs_of(
            row.call.operands, seed, turn, attributes=row.call.attrs.values(), every_magnitude=vast, only=only
        )

    def _accepts(self, call: Call) -> bool:
        """Return whether eager accepts a call, and its result is small enough to compare."""
        run = typical_run(call.operands, 0)
        return not holds_many(self.op, filled(call, run.inputs), call.attrs) and self._refusal(call, run) is None

    def _results(self, call: Call) -> Sequence[torch.Tensor] | None:
        """Return eager's results of a call on typical elements; None if it rejects the call."""
        results = self._reference(call, typical_run(call.operands, 0))
        return None if isinstance(results, str) else results

    def _refusal(self, call: Call, run: Run) -> str | None:
        """Return eager's error for a call on these tensors, as their layout may matter; None if there is none."""
        results = self._reference(call, run)
        return results if isinstance(results, str) else None

    def _reference(self, call: Call, run: Run) -> Sequence[torch.Tensor] | str:
        try:
            with torch.no_grad():
                results = self.op(*filled(call, run.inputs), **call.attrs)
        except Exception as error:  # noqa: BLE001 - any error means that eager rejects the call
            return f"{type(error).__name__}: {(str(error) or '?').splitlines()[0]}"
        found = [results] if isinstance(results, torch.Tensor) else list(results)
        return found or "it returns no tensor at all"

    def _judged(self, name: str, row: DrawnCall, runs: Sequence[Run] | None = None) -> Outcome:
        """Run a call, and reduce the first failure."""
        outcome = self._outcome(name, row, runs)
        if not outcome.verdict.is_failure or self.shrunk:
            return outcome
        self.shrunk = True
        profile, strategy = self.suite.profile, calls(self.op, self.dtype)
        smaller = shrink(
            strategy,
            self.count,
            self._seed("drawn"),
            lambda other: self._outcome(name, other).verdict is outcome.verdict,
            profile.shrink_seconds,
        )
        small = outcome if smaller is None else self._outcome(name, smaller)
        return small if small.case is None else replace(Batch(self.suite).outcome(small.case), name=name)

    def _outcome(self, name: str, row: DrawnCall, runs: Sequence[Run] | None = None) -> Outcome:
        """Return the outcome of a call."""
        made = self._case(name, row, runs)
        return made if isinstance(made, Outcome) else replace(run_case(made, self.suite), name=name)

    def _case(self, name: str, row: DrawnCall, runs: Sequence[Run] | None = None) -> Case | Outcome:
        """Return a call as a case, or an outcome if eager rejects it or it has no type."""
        if row.error:
            return Outcome(name, Comparison(Verdict.SAMPLE, row.error))
        text = shown(self.op, row.call)
        if runs is None:
            runs = self._runs(row, row.seed, row.vector, only=row.vector)
        before = [t.clone() for t in runs[0].inputs]
        refused = self._refusal(row.call, runs[0])
        if refused is not None:
            return Outcome(name, _blamed(text, refused, row))
        written = [i for i, t in enumerate(runs[0].inputs) if not same_bits(t, before[i])]
        if written:
            return Outcome(
                name, Comparison(Verdict.CONTRACT, f"the reference writes into operand {written[0]} of {text}")
            )
        accepted = [runs[0], *(run for run in runs[1:] if self._refusal(row.call, run) is None)]
        try:
            graph = graph_of(self.op, filled(row.call, accepted[0].inputs), row.call.attrs)
        except ClikaError as error:
            return Outcome(name, Comparison(Verdict.CONTRACT, f"{text}: {error}"))
        other = unjudged_in(graph)
        if other is not None:
            return Outcome(name, other)
        facts = {"attrs": dict(row.call.attrs), "shapes": [list(o.shape) for o in _samples(row.call)], "call": text}
        return Case(self._name(name), graph, accepted, facts)


def _blamed(text: str, refused: str, row: DrawnCall) -> Comparison:
    """Return the comparison for a call that eager rejects.

    It is the samples' fault, unless they do not name the dtype or eager has no kernel for it.
    """
    if "not implemented for" in refused or refused.startswith("NotImplementedError"):
        return not_run(Reason.NO_KERNEL, f"eager has no kernel for {text}: {refused}")
    if row.beyond:
        message = f"eager does not take {text}, a dtype that its samples do not name: {refused}"
        return not_run(Reason.UNNAMED_DTYPE, message)
    return Comparison(Verdict.SAMPLE, f"the samples draw {text}, which eager refuses: {refused}")
