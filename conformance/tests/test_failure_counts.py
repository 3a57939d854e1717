"""Kinds of failures: an expected failure does not end a task for its other checks."""

from dataclasses import replace

import pytest
from clika_ref_conformance.cases import Task
from clika_ref_conformance.deviations import ExpectedFailure
from clika_ref_conformance.execution.failure_counts import TaskFailures
from clika_ref_conformance.execution.run import RunRequest, execute_plan, plan_run
from clika_ref_conformance.profiles import select_profile
from clika_ref_conformance.verdicts import Verdict

TASK = Task("faulty", "fails-always")
ENTRY = ExpectedFailure("faulty/*", "a reason", "a link", "2999-01-01", check="check-[01]")

EXPECTED = """
[[xfail]]
task = "faulty/fails-always"
check = "check-[01]"
reason = "they fail"
link = "none: made up"
expires = "2999-01-01"
"""


def test_task_failures_count_expected_apart():
    """Expected failures do not count for checks that are not expected to fail."""
    failures = TaskFailures(TASK, [ENTRY], {"check-0": Verdict.VALUE})
    assert not failures.add("check-1", Verdict.VALUE), "the first was in another process"
    assert failures.add("check-2", Verdict.VALUE), "the first that was not expected"
    assert not failures.add("check-3", Verdict.PASS)
    assert failures.most_frequent("check-1") == (Verdict.VALUE, 2)
    assert failures.most_frequent("check-2") == (Verdict.VALUE, 1)
    assert not failures.add("check-3", Verdict.VALUE)
    assert not failures.add("check-4", Verdict.VALUE)
    assert failures.most_frequent("check-1") == (Verdict.VALUE, 3), "a task that fails otherwise is not gone on with"
    assert (
        TaskFailures(TASK, [replace(ENTRY, task="other/*")], {"check-0": Verdict.VALUE}).most_frequent("check-2")[1]
        == 1
    )


@pytest.mark.slow
@pytest.mark.parametrize("declared", ["", EXPECTED])
def test_run_after_expected_failures_other_checks_run(declared, tmp_path, monkeypatch):
    """After expected failures, the other checks of the task are run."""
    monkeypatch.syspath_prepend(tmp_path)
    module = "with_expected" if declared else "without_expected"
    text = "from clika_ref_conformance.targets.identity import Identity\nTARGET = Identity()\n"
    (tmp_path / f"{module}.py").write_text(text)
    (tmp_path / "deviations.toml").write_text(declared)
    profile = replace(select_profile("quick"), most_failures=2)
    request = RunRequest(
        f"{module}:TARGET", profile, ("fails-always",), workers=1, available_levels={"faulty": "faulty_level"}
    )
    record = execute_plan(plan_run(request))
    first, last = (Verdict.XFAIL, Verdict.VALUE) if declared else (Verdict.VALUE, Verdict.NOT_RUN)
    assert [r.verdict for r in record.results] == [first] * 2 + [last] * 2
    assert record.exit_code == 1
