"""Reports: the worst case of each task is kept, a written report is read back, and damaged ones are rejected."""

import ast
import json
import math
import re
import xml.etree.ElementTree as ET
from dataclasses import replace
from pathlib import Path

import pytest
from clika_ref_conformance.cases import Task
from clika_ref_conformance.deviations import Deviation
from clika_ref_conformance.execution.declaration_accounting import count_deviations
from clika_ref_conformance.record import CheckResult
from clika_ref_conformance.reporting import json_report
from clika_ref_conformance.reporting.json_report import read_json, report_to_json, write_json
from clika_ref_conformance.reporting.junit import render_junit, write_junit
from clika_ref_conformance.reporting.report import SEVERITY_BY_VERDICT, UnrunChecks, find_worst_verdict
from clika_ref_conformance.reporting.report_builder import make_report
from clika_ref_conformance.reproducing.errors import ReportError
from clika_ref_conformance.verdicts import Reason, Verdict, make_not_run
from small_reports import FOLD, RELU, SUM, make_failed_result, make_passed_result, record


def make_small_record():
    """Return the record of a run of three tasks."""
    return record(
        make_passed_result(RELU, "a", 0.1),
        make_passed_result(RELU, "b", 0.7, quality=4.0),
        make_failed_result(SUM, "c", ratio=5.0),
        make_failed_result(SUM, "d", ratio=9.0),
        make_failed_result(SUM, "e", Verdict.CRASH, 0.0),
        make_failed_result(FOLD, "f", Verdict.NOT_RUN),
        make_failed_result(FOLD, "g", Verdict.UNSUPPORTED),
        part="-k sum",
    )


def test_severity_ranks_failures_above_all_others():
    """Each verdict has a rank, and failures rank above all others."""
    assert set(SEVERITY_BY_VERDICT) == set(Verdict)
    assert min(SEVERITY_BY_VERDICT[v] for v in Verdict if v.is_failure) > max(
        SEVERITY_BY_VERDICT[v] for v in Verdict if not v.is_failure
    )


def test_worst_verdict_pass_outranks_unsupported():
    """One pass ranks above any number of unsupported checks."""
    assert find_worst_verdict({Verdict.UNSUPPORTED: 9, Verdict.PASS: 1, Verdict.NOT_RUN: 3}) is Verdict.PASS
    assert find_worst_verdict({Verdict.PASS: 9, Verdict.VALUE: 1, Verdict.CRASH: 0}) is Verdict.VALUE
    assert find_worst_verdict({}) is Verdict.NOT_RUN


def test_make_report_keeps_worst_case_per_verdict():
    """The worst case of each task and verdict is kept; others are counted."""
    relu, total, fold = make_report(make_small_record()).tasks
    assert [(d.verdict, d.check) for d in relu.details] == [(Verdict.PASS, "b")]
    assert [(d.verdict, d.check) for d in total.details] == [(Verdict.CRASH, "e"), (Verdict.VALUE, "d")]
    assert dict(total.verdicts) == {Verdict.CRASH: 1, Verdict.VALUE: 2}
    assert (relu.elements, relu.ambiguous, relu.seconds, relu.grade) == (12, 2, 0.5, "B")
    assert (total.verdict, total.grade, fold.verdict) == (Verdict.CRASH, "", Verdict.UNSUPPORTED)


def test_make_report_prefers_replayable_case():
    """A case with a reproducer is preferred to one with a larger error."""
    found = make_report(
        record(
            make_failed_result(SUM, "a", ratio=1e9), make_failed_result(SUM, "b", ratio=2.0, reproducer="cases/b.zip")
        )
    )
    assert found.tasks[0].details[0].check == "b"


def test_make_report_nan_ratio_counts_as_largest():
    """A ratio of NaN counts as the largest."""
    found = make_report(
        record(
            make_failed_result(SUM, "a", ratio=1.0),
            make_failed_result(SUM, "b", ratio=math.nan),
            make_failed_result(SUM, "c", ratio=2.0),
        )
    )
    assert found.tasks[0].details[0].check == "b"


def test_make_report_counts_equal_run_counts():
    """The counts of a report equal those of the run."""
    run = make_small_record()
    report = make_report(run)
    assert report.counts == run.counts
    assert (report.planned, report.failures) == (7, 3)
    assert report.not_run == {"no reason given": UnrunChecks(1, "off by 9.0")}
    assert report.levels == ["operators", "passes"]


def test_make_report_not_run_counted_by_reason():
    """Checks that were not run are counted by reason, with one example."""
    texts = [
        (Reason.ABANDONED, "stopped"),
        (Reason.NO_KERNEL, "randn(size=(2,))"),
        (Reason.NO_KERNEL, "randn(size=())"),
    ]
    results = [CheckResult(SUM, text, make_not_run(reason, text)) for reason, text in texts]
    found = make_report(record(*results, make_passed_result(SUM, "fine"))).not_run
    assert list(found.items()) == [
        (Reason.NO_KERNEL, UnrunChecks(2, "randn(size=(2,))")),
        (Reason.ABANDONED, UnrunChecks(1, "stopped")),
    ]


def test_not_run_comparisons_name_a_reason():
    """Each comparison that is not run names a reason."""
    package = Path(json_report.__file__).parents[1]
    trees = {path: ast.parse(path.read_text(encoding="utf-8")) for path in package.rglob("*.py")}
    bare = [
        f"{path.name}:{node.lineno}"
        for path, tree in trees.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and path.name != "verdicts.py"
        if any(ast.unparse(argument) == "Verdict.NOT_RUN" for argument in node.args)
        if ast.unparse(node.func).endswith(("Comparison", "_result"))
    ]
    assert bare == []


KEYS = {"environment": "NAME", "facts": "NAME", "verdicts": "VERDICT", "not_run": "REASON"}


def find_paths(document, path=""):
    """Yield the path of each entry of a document; keys that are no field names count as one."""
    if isinstance(document, list):
        return {place for item in document for place in find_paths(item, f"{path}[]")}
    if not isinstance(document, dict):
        return {path}
    key = KEYS.get(path.rpartition(".")[2])
    return {p for name, item in document.items() for p in find_paths(item, f"{path}.{key or name}".lstrip("."))}


def test_report_json_documented_fields_equal_written():
    """The documented fields equal those that are written."""
    text = (Path(__file__).parents[2] / "docs/conformance.md").read_text(encoding="utf-8")
    (section,) = re.findall(r"^## report\.json\n(.*?)^## ", text, re.DOTALL | re.MULTILINE)
    documented = [name for row in re.findall(r"^\| (`.*?) \|", section, re.MULTILINE) for name in row.split(", ")]
    declared = Deviation("d", ("relu",), "it does", "https://example.org", "2999-01-01")
    run = replace(make_small_record(), deviations=count_deviations([declared], []), problems=["one is gone"])
    written = find_paths(json_report.to_json(report_to_json(make_report(run))))
    assert sorted(documented) == sorted(f"`{place}`" for place in written)
    assert f"by schema {json_report.SCHEMA_VERSION}." in section


def test_make_report_includes_problems_and_doubts():
    """A report contains the problems and inconclusive_reasons of the run."""
    run = replace(make_small_record(), problems=["a deviation expired"], inconclusive_reasons=["nothing was proven"])
    assert make_report(run).problems == ["a deviation expired", "nothing was proven"]


def test_read_json_returns_written_report(tmp_path):
    """A report is read as it was written."""
    report = make_report(make_small_record())
    write_json(report, tmp_path / "report.json")
    text = (tmp_path / "report.json").read_text()
    assert json.loads(text)["schema"] == json_report.SCHEMA_VERSION
    assert "Infinity" not in text
    assert report_to_json(read_json(tmp_path / "report.json"))["tasks"][0] == report_to_json(report)["tasks"][0]
    write_json(read_json(tmp_path / "report.json"), tmp_path / "again.json")
    assert (tmp_path / "again.json").read_text() == text


def make_change(*path, value):
    """Return a function that changes one entry."""

    def change(document):
        place = document
        for key in path[:-1]:
            place = place[key]
        place[path[-1]] = value
        return document

    return change


DAMAGES = {
    "a newer schema": (make_change("schema", value=99), "schema 99, but this suite reads schema 2. Update the suite."),
    "no schema": (
        make_change("schema", value=0),
        "schema 0, but this suite reads schema 2. A development version wrote it; run again.",
    ),
    "another plan": (make_change("planned", value=999), "999 checks were planned, "),
    "no tasks": (make_change("tasks", value=None), r"it is damaged, or no report of a run \(TypeError"),
    "an unknown verdict": (make_change("tasks", 0, "verdicts", value={"fine": 1}), "'fine' is not a valid Verdict"),
    "a negative count": (make_change("tasks", 0, "verdicts", value={"pass": -1}), "pass is -1, not a count"),
    "a text for a number": (make_change("tasks", 0, "details", 0, "error", value="x"), "error is 'x', not a number"),
    "other accounts": (
        make_change("tasks", 0, "verdicts", value={"pass": 5}),
        "cannot read the report: its verdicts are",
    ),
    "a case elsewhere": (
        make_change("tasks", 0, "details", 0, "reproducer", value="../../etc/passwd"),
        "is outside the folder cases/",
    ),
    "a list": (lambda document: [document], "it is damaged, or no report of a run"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_read_json_damaged_report_raises(tmp_path, damage):
    """A damaged report raises ReportError with the reason."""
    change, message = DAMAGES[damage]
    write_json(make_report(make_small_record()), tmp_path / "report.json")
    document = change(json.loads((tmp_path / "report.json").read_text()))
    (tmp_path / "report.json").write_text(json.dumps(document))
    with pytest.raises(ReportError, match=message):
        read_json(tmp_path / "report.json")


def test_read_json_missing_or_too_large_raises(tmp_path, monkeypatch):
    """A report that is missing, invalid or too large raises ReportError."""
    path = tmp_path / "report.json"
    with pytest.raises(ReportError, match=r"cannot read the report .*report\.json.*No such file"):
        read_json(path)
    path.write_bytes(b"\xff{")
    with pytest.raises(ReportError, match="it is damaged, or no report of a run"):
        read_json(path)
    monkeypatch.setattr(json_report, "MAX_REPORT_BYTES", 1)
    with pytest.raises(ReportError, match="more than 1"):
        read_json(path)


def test_write_junit_suite_per_level_case_per_task(tmp_path):
    """JUnit has a suite for each level and a case for each task."""
    write_junit(make_report(make_small_record()), tmp_path / "junit.xml")
    root = ET.parse(tmp_path / "junit.xml").getroot()  # noqa: S314 - written above
    assert [suite.get("name") for suite in root] == ["operators", "passes"]
    assert (root.get("tests"), root.get("failures"), root.get("skipped")) == ("3", "1", "1")
    (failure,) = root.iter("failure")
    assert failure.get("type") == "crash"
    assert failure.get("message") == "1 crash, 2 fail:value"
    assert "fail:value in d on the inputs nan-first\noff by 9.0\ndim: -1" in failure.text


def test_render_junit_unproven_task_skipped_with_reason():
    """A task whose checks prove nothing is skipped, with a reason."""
    silent = [
        make_failed_result(SUM, "c", Verdict.XFAIL),
        make_failed_result(SUM, "d", Verdict.NOT_RUN),
        make_failed_result(SUM, "e", Verdict.NOT_RUN),
    ]
    unstable = [make_failed_result(FOLD, "f", Verdict.UNSTABLE)]
    proving = [make_failed_result(RELU, "a", Verdict.XFAIL), make_passed_result(RELU, "b")]
    root = ET.fromstring(render_junit(make_report(record(*silent, *unstable, *proving))))  # noqa: S314 - written here
    messages = {case.get("name"): [e.get("message") for e in case] for case in root.iter("testcase")}
    assert messages == {
        str(SUM): ["1 xfail, 2 not-run: off by 9.0"],
        str(FOLD): ["1 reference_unstable: off by 9.0"],
        str(RELU): [],
    }


def test_render_junit_escapes_invalid_xml():
    """Names and messages may contain characters that XML does not allow."""
    result = make_failed_result(Task("operators", "<script>&\x00\x1b"), "a\x08")
    written = render_junit(make_report(record(result, problems=["gone & <forgotten>\x00"])))
    root = ET.fromstring(written)  # noqa: S314 - written above
    names = [case.get("name") for case in root.iter("testcase")]
    assert names == ["operators/<script>&\ufffd\ufffd", "gone & <forgotten>\ufffd"]
    assert root.get("failures") == "2"
