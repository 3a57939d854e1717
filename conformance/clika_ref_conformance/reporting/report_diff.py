"""Compare two reports of one target: regressions, fixes, additions and removals."""

from __future__ import annotations

import re
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from fractions import Fraction

from clika_ref_conformance.cases import Task
from clika_ref_conformance.reporting.report import Report, TaskReport
from clika_ref_conformance.reproducing.errors import ReportError
from clika_ref_conformance.verdicts import PROVING_VERDICTS, Verdict

FAILING_VERDICTS = frozenset(verdict for verdict in Verdict if verdict.is_failure)


@dataclass(frozen=True)
class ReportChange:
    """Change of a task, a deviation or a problem from the old report to the new one."""

    subject: Task | str
    text: str

    def __str__(self) -> str:
        return f"{self.subject}: {self.text}"


@dataclass(frozen=True)
class ReportDiff:
    """All changes, by kind."""

    notices: Sequence[str]
    """Reasons why not all of the two reports can be compared."""
    regressions: Sequence[ReportChange]
    """Tasks that fail more, or prove less."""
    fixed: Sequence[ReportChange]
    new: Sequence[ReportChange]
    missing: Sequence[ReportChange]

    @property
    def exit_code(self) -> int:
        """1 if there are regressions, else 0."""
        return 1 if self.regressions else 0


def compare_reports(old: Report, new: Report) -> ReportDiff:
    """Compare two reports, task by task.

    A task is a regression in these cases:

    - a failing verdict takes a larger share of its checks;
    - a smaller share of its checks proves something;
    - results that were correct now deviate as declared;
    - its grade fell.

    Another profile or seed draws other calls, with shares that differ by chance. Then only two changes are regressions:
    a verdict fails that never failed before, or a task no longer proves anything. If both reports have the same plan, a
    removed task is a regression, too. If they cover different parts of it, statements on the run as a whole are neither
    regressions nor fixes: neither problems, nor that an expected failure has no failing check.

    Raises:
        ReportError: the reports are of different targets.
    """
    if old.target != new.target:
        raise ReportError(
            f"cannot compare the reports: they are of two targets, {old.target} and {new.target}. Show both in one "
            "matrix with `clika-ref conformance report`."
        )
    is_same_plan = (old.profile, old.seed) == (new.profile, new.seed)
    before, after = ({entry.task: entry for entry in report.tasks} for report in (old, new))
    failing = FAILING_VERDICTS if old.part == new.part else FAILING_VERDICTS - {Verdict.XPASS}
    shared = [(before[task], entry) for task, entry in after.items() if task in before]
    judged = [(a, b, _describe_regression(a, b, failing, is_same_plan=is_same_plan)) for a, b in shared]
    regressions = [ReportChange(b.task, text) for _, b, text in judged if text]
    improved = [
        (a, b, text)
        for a, b, has_regressed in judged
        if not has_regressed and (text := _describe_fix(a, b, failing, is_same_plan=is_same_plan))
    ]
    fixed = [ReportChange(b.task, text) for a, b, text in improved if not _is_declared_only(a, b)]
    added = [ReportChange(b.task, text) for a, b, text in improved if _is_declared_only(a, b)]
    added += [ReportChange(task, _summarize(entry)) for task, entry in after.items() if task not in before]
    missing = [
        ReportChange(task, f"is missing, was {_summarize(entry)}")
        for task, entry in before.items()
        if task not in after
    ]
    new_problems = [ReportChange("problem", problem) for problem in _find_new_problems(new.problems, old.problems)]
    old_problems = [ReportChange("problem", problem) for problem in _find_new_problems(old.problems, new.problems)]
    if old.part != new.part:
        added, missing = [*added, *new_problems], [*missing, *old_problems]
    else:
        lost, missing = (missing, []) if is_same_plan else ([], missing)
        regressions, fixed = [*regressions, *lost, *new_problems], [*fixed, *old_problems]
    return ReportDiff(
        _list_notices(old, new),
        regressions,
        fixed,
        [*added, *_find_new_deviations(new, old)],
        [*missing, *_find_new_deviations(old, new)],
    )


def _list_notices(old: Report, new: Report) -> list[str]:
    found: list[str] = []
    for label in ("profile", "seed"):
        one, other = getattr(old, label), getattr(new, label)
        if one != other:
            text = (
                f"The {label} changed from {one} to {other}, so other calls are drawn. Only the verdicts that occur are"
            )
            found.append(f"{text} compared, not their counts, and a missing task is no regression.")
    if old.part != new.part:
        one, other = (f"`{report.part}`" if report.part else "everything" for report in (old, new))
        found.append(
            f"The old run covers {one}, and the new one {other}: tasks and problems of one report only are neither "
            "regressions nor fixes."
        )
    return found


def _describe_regression(old: TaskReport, new: TaskReport, failing: AbstractSet[Verdict], *, is_same_plan: bool) -> str:
    reasons = [
        f"{_describe_counts(old, new, verdict)}{_quote_first_message(new, verdict)}"
        for verdict in new.verdicts
        if verdict in failing and _has_grown(old, new, {verdict}) and (is_same_plan or not old.verdicts.get(verdict))
    ]
    if is_same_plan:
        unproven = set(Verdict) - FAILING_VERDICTS - PROVING_VERDICTS
        if _has_grown(new, old, PROVING_VERDICTS) and _has_grown(old, new, unproven):
            reasons.append(f"proves less: {_summarize(new)}, was {_summarize(old)}")
        elif not reasons and _has_grown(new, old, {Verdict.PASS}) and _has_grown(old, new, {Verdict.DEVIATION}):
            reasons.append(f"deviates more: {_summarize(new)}, was {_summarize(old)}")
        if old.grade and new.grade > old.grade:
            reasons.append(f"the grade is {new.grade}, was {old.grade}")
    elif not reasons and not PROVING_VERDICTS.isdisjoint(old.verdicts) and PROVING_VERDICTS.isdisjoint(new.verdicts):
        reasons.append(f"proves nothing any more: {_summarize(new)}, was {_summarize(old)}")
    return "; ".join(reasons)


def _describe_fix(old: TaskReport, new: TaskReport, failing: AbstractSet[Verdict], *, is_same_plan: bool) -> str:
    fewer = {v for v in old.verdicts if _has_grown(new, old, {v}) and (is_same_plan or not new.verdicts.get(v))}
    found = [
        f"{_describe_counts(old, new, verdict)}{', no longer expected to fail' * (verdict is Verdict.XPASS)}"
        for verdict in old.verdicts
        if verdict in failing & fewer
    ]
    if found and _has_grown(old, new, {Verdict.XFAIL}):
        found.append(f"{_describe_counts(old, new, Verdict.XFAIL)}, expected to fail now")
    elif Verdict.XFAIL in fewer and _has_grown(old, new, PROVING_VERDICTS):
        found.append(f"{_describe_counts(old, new, Verdict.XFAIL)}, no longer failing")
    return "; ".join(found)


def _is_declared_only(old: TaskReport, new: TaskReport) -> bool:
    """Return whether as much fails as before, but is now expected to: nothing was fixed."""
    return _has_grown(old, new, {Verdict.XFAIL}) and not _has_grown(new, old, FAILING_VERDICTS | {Verdict.XFAIL})


def _has_grown(old: TaskReport, new: TaskReport, verdicts: AbstractSet[Verdict]) -> bool:
    """Return whether verdicts take a larger share of all checks of a task than before."""
    return _compute_share(new, verdicts) > _compute_share(old, verdicts)


def _compute_share(entry: TaskReport, verdicts: AbstractSet[Verdict]) -> Fraction:
    total = sum(entry.verdicts.values())
    return Fraction(sum(entry.verdicts.get(v, 0) for v in verdicts), total) if total else Fraction(0)


def _describe_counts(old: TaskReport, new: TaskReport, verdict: Verdict) -> str:
    after, before = (f"{e.verdicts.get(verdict, 0)} of {sum(e.verdicts.values())}" for e in (new, old))
    return f"{verdict} in {after} checks, was in {before}"


def _quote_first_message(entry: TaskReport, verdict: Verdict) -> str:
    found = next((d for d in entry.details if d.verdict is verdict), None)
    return "" if found is None else f" ({found.check}: {found.comparison.message.partition(chr(10))[0]})"


def _summarize(entry: TaskReport) -> str:
    return ", ".join(f"{count} {verdict}" for verdict, count in entry.verdicts.items()) or "no checks"


def _find_new_problems(problems: Sequence[str], others: Sequence[str]) -> list[str]:
    """Return the problems that are not among others, ignoring numbers, which differ from run to run."""
    known = {re.sub(r"\d[\d,.]*", "#", problem) for problem in others}
    return [problem for problem in problems if re.sub(r"\d[\d,.]*", "#", problem) not in known]


def _find_new_deviations(report: Report, other: Report) -> list[ReportChange]:
    """Return the deviations that occurred in one report only."""
    known = {account["id"] for account in other.deviations if account["occurred"]}
    occurred = [account for account in report.deviations if account["occurred"] and account["id"] not in known]
    return [
        ReportChange(f"deviation {account['id']}", f"{account['occurred']} checks: {account['reason']}")
        for account in occurred
    ]
