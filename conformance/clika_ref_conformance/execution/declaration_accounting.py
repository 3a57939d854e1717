"""Accounting of declarations: deviations that do not occur, expected failures that pass, and expired entries."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from clika_ref_conformance.cases import Task
from clika_ref_conformance.deviations import Declarations, Deviation, ExpectedFailureScopes, is_expired
from clika_ref_conformance.execution.check_runner import BROKEN_PLAN_CHECK
from clika_ref_conformance.profiles import MOST_THOROUGH_PROFILE, Profile
from clika_ref_conformance.record import CheckResult, RunRecord
from clika_ref_conformance.verdicts import PROVING_VERDICTS, Comparison, Verdict


def apply_expected_failures(results: Sequence[CheckResult], scopes: ExpectedFailureScopes) -> list[CheckResult]:
    """Return the results with expected failures as XFAIL, or as XPASS if no check of an entry failed.

    There is no XPASS if checks of an entry were not run, as they may have failed: tasks of another profile or part,
    draws of another profile or seed, and checks of a task that failed too often.

    Args:
        results: results of a run.
        scopes: expected failures and the tasks that they concern.
    """
    changed = list(results)
    ran = _find_done_tasks(results)
    for entry, scope in scopes.items():
        matching = [i for i, r in enumerate(results) if entry.concerns(r.task, r.name)]
        failed = [i for i in matching if results[i].verdict.is_failure]
        passed = [i for i in matching if results[i].verdict in (Verdict.PASS, Verdict.DEVIATION)]
        for i in failed:
            message = f"expected ({entry.reason}, {entry.link}): {results[i].verdict}: {results[i].comparison.message}"
            changed[i] = _replace_verdict(results[i], Verdict.XFAIL, message)
        is_whole = (
            scope <= ran
            and not entry.has_draw_counter
            and not any(results[i].is_skipped_after_failures for i in matching)
        )
        for i in passed if is_whole and not failed else ():
            message = f"expected to fail ({entry.reason}, {entry.link}), but passes. Remove [[xfail]] {entry.task}."
            changed[i] = _replace_verdict(results[i], Verdict.XPASS, message)
    return changed


def _find_done_tasks(results: Sequence[CheckResult]) -> set[Task]:
    """Return the tasks that were planned and run to their end; the others prove nothing."""
    undone = {r.task for r in results if r.is_abandoned or r.name == BROKEN_PLAN_CHECK}
    return {r.task for r in results} - undone


def _replace_verdict(result: CheckResult, verdict: Verdict, message: str) -> CheckResult:
    return replace(result, comparison=replace(result.comparison, verdict=verdict, message=message))


def count_deviations(deviations: Sequence[Deviation], results: Sequence[CheckResult]) -> list[Mapping[str, Any]]:
    """Return each deviation with the numbers of checks where it occurred and where it could have."""
    occurred = Counter(name for r in results for name in r.deviations)
    applicable = Counter(name for r in results for name in r.applicable)
    return [
        {
            "id": d.id,
            "operators": list(d.operators),
            "reason": d.reason,
            "link": d.link,
            "since": d.since,
            "expires": d.expires,
            "occurred": occurred[d.id],
            "applicable": applicable[d.id],
        }
        for d in deviations
    ]


def find_problems(
    record: RunRecord, declarations: Declarations, scopes: ExpectedFailureScopes, profile: Profile, *, is_full: bool
) -> list[str]:
    """Return the problems of the declarations that a run shows.

    Only a full run reports that a deviation did not occur. In a partial run, few checks could show it, so it
    may be absent by chance. Only the most thorough profile reports that an expected failure concerns nothing, after all
    of its tasks: other profiles may have no check of that name.
    """
    counts = {account["id"]: account for account in record.deviations}
    problems: list[str] = []
    for d in declarations.deviations:
        account = counts[d.id]
        if is_full and account["applicable"] and not account["occurred"]:
            problems.append(
                f"xpass: the deviation {d.id} occurred in none of {account['applicable']} applicable checks. The "
                "target now agrees with eager: remove the entry."
            )
        if is_full and d.is_reachable(profile) and not account["applicable"]:
            problems.append(f"the deviation {d.id} matches no check of the plan. Correct its conditions, or remove it.")
    done = _find_done_tasks(record.results)
    problems += [
        f"{entry} matches no check of the plan. Correct its patterns, or remove it."
        for entry, scope in scopes.items()
        if profile.name == MOST_THOROUGH_PROFILE and scope and scope <= done
        if not any(entry.concerns(r.task, r.name) for r in record.results)
    ]
    for entry in (*declarations.deviations, *declarations.xfails):
        if is_expired(entry.expires):
            name = entry.id if isinstance(entry, Deviation) else str(entry)
            problems.append(f"{name} expired ({entry.expires}): check whether it still applies, and set a new date")
    return problems


MAX_EAGER_ERROR_SHARE = 0.01
"""Maximum share of finite unstable elements per subject and dtype: numbers of eager beyond the suite's bound."""

MAX_EAGER_ERRORS = 10
"""More of these are no single error of PyTorch, such as undefined memory that it returns for an empty sum."""

NARROW_RANGE_DTYPE = "float16"
"""Sums of squares may overflow this dtype although the result does not: such elements do not refute the bound."""

TARGETLESS_TASK_PREFIXES = ("contract/", "passes/", "quantization/packing")
"""Prefixes of the names of tasks that run no target."""


def find_inconclusive_reasons(record: RunRecord) -> list[str]:
    """Return why a run is inconclusive: eager exceeds the suite's bounds, or the target neither passed nor failed."""
    counted: dict[tuple[str, str], list[Comparison]] = {}
    for result in record.results:
        counted.setdefault((result.task.subject, result.task.dtype), []).append(result.comparison)
    shares = {key: (sum(c.unstable_finite for c in cs), sum(c.elements for c in cs)) for key, cs in counted.items()}
    found = [
        f"{subject} in {dtype}: eager itself exceeds the bound in {wrong:,} of {elements:,} elements, "
        f"more than {MAX_EAGER_ERROR_SHARE:.0%}. Correct the error class of the operator, or its reference."
        for (subject, dtype), (wrong, elements) in shares.items()
        if wrong > max(MAX_EAGER_ERROR_SHARE * elements, MAX_EAGER_ERRORS) and dtype != NARROW_RANGE_DTYPE
    ]
    tested = Counter(r.verdict for r in record.results if not str(r.task).startswith(TARGETLESS_TASK_PREFIXES))
    if tested and not any(verdict in PROVING_VERDICTS or verdict.is_failure for verdict in tested):
        counts = ", ".join(f"{count:,} {verdict}" for verdict, count in tested.most_common())
        found.append(f"no check proves anything about {record.target}: {counts}")
    return found
