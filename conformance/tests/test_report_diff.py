"""Two reports are compared: regressions, fixes, and new and missing tasks; a declaration fixes nothing."""

from dataclasses import replace

import pytest
from clika_ref_conformance.reporting.report_builder import make_report
from clika_ref_conformance.reporting.report_diff import compare_reports
from clika_ref_conformance.reproducing.errors import ReportError
from clika_ref_conformance.verdicts import Verdict
from small_reports import FOLD, RELU, SUM, SUM_DYNAMIC, make_failed_result, make_passed_result, record

EITHER = "tasks and problems of one report only are neither regressions nor fixes."


def compare(old, new, **changes):
    """Return the subjects of each kind of change: subjects of tasks, and names of anything else."""
    found = compare_reports(make_report(record(*old)), make_report(record(*new, **changes)))
    kinds = (found.regressions, found.fixed, found.new, found.missing)
    return [[getattr(change.subject, "subject", change.subject) for change in kind] for kind in kinds], found


def make_verdict_pairs(passing, *others, task=SUM):
    """Return verdicts as pairs of a count and a verdict, passing ones first."""
    verdicts = [verdict for count, verdict in others for _ in range(count)]
    return [
        *(make_passed_result(task, f"pass-{i}") for i in range(passing)),
        *(make_failed_result(task, f"{i}", v) for i, v in enumerate(verdicts)),
    ]


def test_compare_reports_new_failure_regresses_and_missing_fixed():
    """A failure that appears is a regression; one that disappears is fixed."""
    subjects, found = compare(
        [make_passed_result(RELU, "a"), make_failed_result(SUM, "b"), make_passed_result(FOLD, "c")],
        [make_failed_result(RELU, "a", ratio=3.0), make_passed_result(SUM, "b"), make_passed_result(FOLD, "c")],
    )
    assert subjects == [["relu"], ["sum"], [], []]
    assert (
        str(found.regressions[0])
        == "operators/relu/float32: fail:value in 1 of 1 checks, was in 0 of 1 (a: off by 3.0)"
    )
    assert str(found.fixed[0]) == "operators/sum/float32: fail:value in 0 of 1 checks, was in 1 of 1"
    assert found.exit_code == 1
    assert not found.notices


def test_compare_reports_more_failures_regress():
    """More failures among as many checks are a regression; fewer are fixed."""
    one, two = (
        [make_failed_result(SUM, "a"), make_passed_result(SUM, "b")],
        [make_failed_result(SUM, "a"), make_failed_result(SUM, "b")],
    )
    assert compare(one, two)[0] == [["sum"], [], [], []]
    assert compare(two, one)[0] == [[], ["sum"], [], []]


def test_compare_reports_other_check_count_compares_share():
    """Among another number of checks, the share of failures decides."""
    one, three = (
        [make_failed_result(SUM, "a")],
        [make_failed_result(SUM, "a"), make_failed_result(SUM, "b"), make_passed_result(SUM, "c")],
    )
    assert compare(one, three)[0] == [[], ["sum"], [], []]
    subjects, found = compare(make_verdict_pairs(22, (1, Verdict.VALUE)), make_verdict_pairs(12, (12, Verdict.VALUE)))
    assert subjects == [["sum"], [], [], []]
    assert "fail:value in 12 of 24 checks, was in 1 of 23" in str(found.regressions[0])


@pytest.mark.parametrize("verdict", [Verdict.UNSUPPORTED, Verdict.NOT_RUN, Verdict.UNSTABLE, Verdict.XFAIL])
def test_compare_reports_less_proof_regresses(verdict):
    """A task that proves less is a regression."""
    assert compare([make_passed_result(SUM, "a")], [make_failed_result(SUM, "a", verdict)])[0] == [["sum"], [], [], []]
    subjects, found = compare(make_verdict_pairs(23), make_verdict_pairs(1, (22, verdict)))
    assert subjects == [["sum"], [], [], []]
    assert str(found.regressions[0]).startswith("operators/sum/float32: proves less: ")
    assert {f"22 {verdict}", "1 pass"} <= set(found.regressions[0].text.removeprefix("proves less: ").split(", "))
    better = ["sum"] * (verdict is Verdict.XFAIL)
    assert compare(make_verdict_pairs(1, (22, verdict)), make_verdict_pairs(23))[0] == [[], better, [], []]


def test_compare_reports_new_deviation_regresses():
    """A pass that becomes a deviation is a regression; a failure that does is fixed."""
    deviating = make_verdict_pairs(20, (3, Verdict.DEVIATION))
    subjects, found = compare(make_verdict_pairs(23), deviating)
    assert subjects == [["sum"], [], [], []]
    assert found.regressions[0].text == "deviates more: 3 deviation:declared, 20 pass, was 23 pass"
    assert compare(make_verdict_pairs(20, (3, Verdict.VALUE)), deviating)[0] == [[], ["sum"], [], []]


def test_compare_reports_new_xfail_not_fixed():
    """A failure that is expected now is new and not fixed."""
    old, new = make_verdict_pairs(2, (1, Verdict.VALUE)), make_verdict_pairs(2, (1, Verdict.XFAIL))
    subjects, found = compare(old, new)
    assert subjects == [[], [], ["sum"], []]
    now = "xfail in 1 of 3 checks, was in 0 of 3, expected to fail now"
    assert found.new[0].text == f"fail:value in 0 of 3 checks, was in 1 of 3; {now}"
    subjects, found = compare(make_verdict_pairs(1, (2, Verdict.VALUE)), new)  # one of two passes
    assert subjects == [[], ["sum"], [], []]
    assert found.fixed[0].text == f"fail:value in 0 of 3 checks, was in 2 of 3; {now}"


def test_compare_reports_other_profile_smaller_share_not_fixed():
    """In another profile, a smaller share of failures is not fixed."""
    for verdict in (Verdict.XFAIL, Verdict.VALUE):
        old, new = make_verdict_pairs(18, (1, verdict)), make_verdict_pairs(137, (3, verdict))
        assert compare(old, new, profile="ci")[0][1] == []
        assert compare(old, make_verdict_pairs(140), profile="ci")[0][1] == ["sum"]


def test_compare_reports_passing_xfail_fixed():
    """An xfail that no longer fails is fixed; one that is not run is not."""
    old = make_verdict_pairs(2, (1, Verdict.XFAIL))
    subjects, found = compare(old, make_verdict_pairs(3))
    assert subjects == [[], ["sum"], [], []]
    assert found.fixed[0].text == "xfail in 0 of 3 checks, was in 1 of 3, no longer failing"
    assert compare(old, make_verdict_pairs(2, (1, Verdict.NOT_RUN)))[0] == [[], [], [], []]
    subjects, found = compare(make_verdict_pairs(2, (1, Verdict.XPASS)), make_verdict_pairs(3))
    assert subjects == [[], ["sum"], [], []]
    assert found.fixed[0].text == "xpass in 0 of 3 checks, was in 1 of 3, no longer expected to fail"


def test_compare_reports_lower_grade_regresses():
    """A grade that fell is a regression."""
    subjects, found = compare([make_passed_result(SUM, "a", quality=2.0)], [make_passed_result(SUM, "a", quality=11.0)])
    assert subjects == [["sum"], [], [], []]
    assert found.regressions[0].text == "the grade is C, was A"
    assert compare([make_passed_result(SUM, "a", quality=11.0)], [make_passed_result(SUM, "a", quality=2.0)])[0] == [
        [],
        [],
        [],
        [],
    ]


def test_compare_reports_missing_task_regresses():
    """A task missing from the same plan is a regression; a new task is not."""
    subjects, found = compare(
        [make_passed_result(SUM, "a")], [make_failed_result(RELU, "a"), make_passed_result(SUM_DYNAMIC, "a")]
    )
    assert subjects == [["sum"], [], ["relu", "sum"], []]
    assert str(found.regressions[0]) == "operators/sum/float32: is missing, was 1 pass"
    assert found.exit_code == 1


def test_compare_reports_partial_run_lists_missing_tasks():
    """In a partial run, missing tasks are listed and the rest is compared."""
    subjects, found = compare(
        [make_passed_result(SUM, "a"), make_passed_result(RELU, "a")], [make_failed_result(RELU, "a")], part="-k relu"
    )
    assert subjects == [["relu"], [], [], ["sum"]]
    assert found.notices == [f"The old run covers everything, and the new one `-k relu`: {EITHER}"]


def test_compare_reports_pytest_selections_compare_shared_tasks():
    """Two selections of pytest are compared only in the tasks that both contain."""
    here, there = (f"{count} of 9 tasks, selected by pytest: {digest}" for count, digest in ((2, "8ab3"), (3, "01cd")))
    one = make_report(
        record(make_passed_result(RELU, "a"), make_failed_result(SUM, "a"), part=here, problems=["d expired"])
    )
    other = record(
        make_failed_result(RELU, "a", Verdict.XPASS),
        make_failed_result(FOLD, "a"),
        make_passed_result(SUM_DYNAMIC, "a"),
        part=there,
    )
    other = make_report(replace(other, problems=["d occurred in none of 12 checks"]))
    for old, new in ((one, other), (other, one)):
        found = compare_reports(old, new)
        assert (found.regressions, found.fixed, found.exit_code) == ([], [], 0)
        assert found.notices == [f"The old run covers `{old.part}`, and the new one `{new.part}`: {EITHER}"]
        came, went = (
            [getattr(change.subject, "level", change.text) for change in kind] for kind in (found.new, found.missing)
        )
        theirs, ours = ["passes", "dynamic", "d occurred in none of 12 checks"], ["operators", "d expired"]
        assert (came, went) == ((theirs, ours) if old is one else (ours, theirs))
    assert [
        str(c) for c in compare_reports(one, make_report(record(make_failed_result(RELU, "a"), part=there))).regressions
    ] == ["operators/relu/float32: fail:value in 1 of 1 checks, was in 0 of 1 (a: off by 9.0)"]


@pytest.mark.parametrize("change", [{"seed": 8}, {"profile": "ci"}])
def test_compare_reports_other_plan_compares_verdict_types(change):
    """In another plan, only the types of verdicts are compared, with a notice."""
    old = [
        *make_verdict_pairs(22, (1, Verdict.VALUE)),
        make_passed_result(RELU, "a"),
        make_passed_result(FOLD, "a"),
        make_passed_result(SUM_DYNAMIC, "a"),
    ]
    new = [
        *make_verdict_pairs(12, (11, Verdict.VALUE)),
        *make_verdict_pairs(3, (1, Verdict.NOT_RUN), task=RELU),
        *make_verdict_pairs(0, (4, Verdict.NOT_RUN), task=FOLD),
    ]
    subjects, found = compare(old, new, **change)
    assert subjects == [["fold-batch-norm"], [], [], ["sum"]]
    assert found.regressions[0].text == "proves nothing any more: 4 not-run, was 1 pass"
    (notice,) = found.notices
    assert notice.startswith(f"The {next(iter(change))} changed from ")
    assert notice.endswith("compared, not their counts, and a missing task is no regression.")
    assert compare([make_passed_result(SUM, "a")], [make_failed_result(SUM, "a")], **change)[0] == [["sum"], [], [], []]


def test_compare_reports_other_target_raises():
    """Reports of two targets are not compared."""
    with pytest.raises(ReportError, match=r"they are of two targets, onnxruntime and identity.*conformance report`"):
        compare([make_passed_result(SUM, "a")], [make_passed_result(SUM, "a")], target="identity")


def test_compare_reports_new_problem_regresses_despite_numbers():
    """A new problem is a regression; changed numbers in its text do not count."""
    before = make_report(record(problems=["x occurred in none of 12 checks", "a deviation expired"]))
    after = make_report(record(problems=["x occurred in none of 1,300 checks", "two workers disagree"]))
    found = compare_reports(before, after)
    assert [str(change) for change in found.regressions] == ["problem: two workers disagree"]
    assert [str(change) for change in found.fixed] == ["problem: a deviation expired"]
    assert found.exit_code == 1


def test_compare_reports_deviation_in_one_report_listed():
    """Deviations seen in one report only are listed."""
    here = [{"id": "b", "reason": "slow", "occurred": 4}, {"id": "one-sided-clip", "reason": "no NaN", "occurred": 0}]
    subjects, found = compare([make_passed_result(SUM, "a")], [make_passed_result(SUM, "a")], deviations=here)
    assert subjects == [[], [], ["deviation b"], ["deviation one-sided-clip"]]
    assert (found.new[0].text, found.missing[0].text) == ("4 checks: slow", "2 checks: no NaN")
    assert found.exit_code == 0
